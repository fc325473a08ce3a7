"""ViTs of MMPretrain (MMClassification before), with and without a distillation token, as its checkpoints have them."""
from __future__ import annotations

from vit_jax.config.schema import Gelu, PositionResize
from vit_jax.weights.families.record import Family, Files
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

TABLE = table("""
    backbone/stem | backbone.patch_embed.projection | conv
    backbone/{cls,dist,positions} | backbone.{cls_token,dist_token,pos_embed} | same
    backbone/blocks/{norm1,norm2} | backbone.layers.{i}.{ln1,ln2} | norm
    backbone/blocks/attn/{query,key,value} | backbone.layers.{i}.attn.{qkv[0/3],qkv[1/3],qkv[2/3]} | dense
    backbone/blocks/attn/out | backbone.layers.{i}.attn.proj | dense
    backbone/blocks/mlp/{up,down} | backbone.layers.{i}.ffn.layers.{0.0,1} | dense
    backbone/blocks/{scale1,scale2} | backbone.layers.{i}.{attn.gamma1,ffn.gamma2}.weight | same
    backbone/norm | backbone.ln1 | norm
    {head,head_dist,head/pre_logits} | head.layers.{head,head_dist,pre_logits} | dense
""")

FAMILY = Family(
    'mmpretrain', 'MMPretrain ViT', '`.pth` of VisionTransformer and DistilledVisionTransformer, with their own heads',
    files=(Files('file', lambda t: {'backbone.patch_embed.projection.weight', 'backbone.layers.0.ffn.layers.0.0.weight'}
                 <= t.keys(), TABLE, Hints(gelu=Gelu.EXACT, norm_eps=1e-6)),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875}, position_resize=PositionResize.BICUBIC,
    unsupported={
        r'backbone\.pre_norm\..*': 'it is a CLIP of MMPretrain, whose GELU and epsilon its file does not show',
        r'backbone\.ln2\..*': 'it normalizes the mean of the patch tokens (out_type=avg_featmap of MMPretrain)',
        r'head\.fc\..*': 'its LinearClsHead reads what out_type of MMPretrain says, which its file does not show'})
