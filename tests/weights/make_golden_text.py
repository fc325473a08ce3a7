"""Makes `golden_text.npz` and `text_files/`: what transformers computes of texts, and of images beside them.

Run where PyTorch, transformers and sentencepiece are:  python tests/weights/make_golden_text.py
Made with torch 2.13, transformers 5.23, tokenizers 0.23.3, sentencepiece 0.2.3; to be made anew when a format is added.

`text_files/` holds one small tokenizer for each family, trained on the words below. For each model the npz has the
names and shapes of its tensors, its config, the ids that its tokenizer makes of TEXTS, the vectors of the texts, and
the logits of three images. Weights and images are those of `drawn.py`.
"""
from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import drawn  # noqa: E402

FILES = HERE / 'text_files'
VOCABULARY = """cat dog horse bird boat house tree car bicycle lamp photo of a the small large red green blue white
black wooden old new painting drawing sketch origami figure street night morning bright dark snow river mountain number
1 2 3 4 5 6 7 8 9 0 it's isn't they're close-up toy plastic rendering cropped many one good bad low resolution"""
TEXTS = ('a photo of a cat', 'A Photo of a CAT.', 'the large, red boat!', "it's a close-up of 3 birds",
         'white   horse ', 'café at night', 'x', ' '.join(['a photo of the old wooden house'] * 20))
TOWER = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 48}
IMAGE = {**TOWER, 'image_size': 32, 'patch_size': 8}
LENGTHS = {'clip': 77, 'siglip': 16, 'siglip2': 64, 'naflex': 64, 'tips': 64}
TOKENIZERS = {'naflex': 'siglip2'}  # where it is not the name of the model


def corpus() -> list[str]:
  """Lines of random words."""
  rng = np.random.default_rng(0)
  return [' '.join(rng.choice(VOCABULARY.split(), 8)) for _ in range(400)]


def train_clip() -> None:
  """Writes `vocab.json` and `merges.txt` of a byte-level BPE with the special tokens of CLIP last."""
  from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
  found = Tokenizer(models.BPE(continuing_subword_prefix='', end_of_word_suffix='</w>'))
  found.normalizer = normalizers.Lowercase()
  found.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Split(Regex(r"'s|'t|'re|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"), behavior='removed', invert=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False)])
  found.train_from_iterator(corpus(), trainers.BpeTrainer(
      vocab_size=700, end_of_word_suffix='</w>', initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False))
  content = json.loads(found.to_str())['model']
  names = list(dict.fromkeys([*content['vocab'], *(f'{x}</w>' for x in sorted(pre_tokenizers.ByteLevel.alphabet())),
                              '<|startoftext|>', '<|endoftext|>']))
  (FILES / 'clip').mkdir(parents=True, exist_ok=True)
  (FILES / 'clip/vocab.json').write_text(json.dumps({name: i for i, name in enumerate(names)}))
  (FILES / 'clip/merges.txt').write_text('\n'.join(['#version: 0.2', *(' '.join(pair) for pair in content['merges'])]))


def train_sentencepiece(folder: str, name: str, **options: Any) -> None:
  import sentencepiece
  (FILES / folder).mkdir(parents=True, exist_ok=True)
  target = FILES / folder / name
  with open(target, 'wb') as file:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=file, pad_id=0, bos_id=-1,
        normalization_rule_name='identity', minloglevel=2, **options)


def train_gemma() -> None:
  """Writes `tokenizer.json` of a BPE as Gemma has it: spaces are a letter, unknown letters are bytes."""
  import transformers
  from tokenizers import Tokenizer, models, normalizers, trainers
  special = ['<pad>', '<eos>', '<bos>', '<unk>', '<mask>', *(f'<0x{i:02X}>' for i in range(256))]
  found = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
  found.normalizer = normalizers.Replace(' ', '▁')
  found.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False))
  content = json.loads(found.to_str())['model']
  made = transformers.Siglip2Tokenizer(content['vocab'], [tuple(pair) for pair in content['merges']])
  (FILES / 'siglip2').mkdir(parents=True, exist_ok=True)
  made.backend_tokenizer.save(str(FILES / 'siglip2/tokenizer.json'))


def ids_of(family: str) -> np.ndarray:
  """The ids `[T, N]` that transformers makes of TEXTS."""
  import transformers as t
  length = LENGTHS[family]
  padded = {'padding': 'max_length', 'truncation': True, 'max_length': length}
  match family:
    case 'clip':
      made = t.CLIPTokenizer.from_pretrained(FILES / 'clip')
    case 'siglip':
      made = t.SiglipTokenizer(str(FILES / 'siglip/spiece.model'), model_max_length=length)
    case 'siglip2' | 'naflex':  # the published file adds an end to each text, and pads after it
      made = t.Siglip2Tokenizer.from_pretrained(FILES / 'siglip2', padding_side='right')
      made.padding_side = 'right'
      from tokenizers.processors import TemplateProcessing
      made.backend_tokenizer.post_processor = TemplateProcessing(single='$A <eos>', special_tokens=[('<eos>', 1)])
    case _:
      made = t.Tipsv2Tokenizer.from_pretrained(FILES / 'tips')
  return np.array(made(list(TEXTS), **padded)['input_ids'])


def model(family: str, vocabulary: int) -> Any:
  """A model of transformers."""
  import transformers as t
  text = {**TOWER, 'vocab_size': vocabulary, 'max_position_embeddings': LENGTHS[family]}
  match family:
    case 'clip':
      ends = {'eos_token_id': vocabulary - 1, 'bos_token_id': vocabulary - 2}
      return t.CLIPModel(t.CLIPConfig(text_config={**text, **ends}, vision_config=IMAGE, projection_dim=16))
    case 'siglip' | 'siglip2':
      return t.SiglipModel(t.SiglipConfig(text_config=text, vision_config=IMAGE))
    case 'naflex':
      return t.Siglip2Model(t.Siglip2Config(text_config=text, vision_config={
          **TOWER, 'patch_size': 8, 'num_patches': 16}))
    case _:
      image = {k: v for k, v in IMAGE.items() if k != 'intermediate_size'}
      return t.Tipsv2Model(t.Tipsv2Config(text_config=text, vision_config={**image, 'mlp_ratio': 1.5}))


def fill(made: Any) -> dict[str, np.ndarray]:
  """Gives a model the drawn weights; its tensors by name."""
  import torch
  found = {}
  for name, old in made.state_dict().items():
    found[name] = tensor(name, tuple(old.shape))
    old.copy_(torch.from_numpy(found[name]))
  made.eval()
  return found


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """The drawn weights; scale, bias and temperature of the logits are near those of published models."""
  known = {'logit_scale': 2.3, 'logit_bias': -3.5, 'temperature': .1}
  return np.full(shape, known[name], np.float32) if name in known else np.asarray(drawn.tensor(name, shape))


def outputs(family: str, made: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
  import torch
  image = torch.from_numpy(drawn.image(32, 3)).permute(0, 3, 1, 2).contiguous()
  tokens = torch.from_numpy(ids)
  more = {'attention_mask': tokens > 0} if family == 'tips' else {}
  pixels = {'pixel_values': image}
  if family == 'naflex':  # patches row by row, their channels last
    patches = drawn.image(32, 3).reshape(3, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5).reshape(3, 16, 192)
    pixels = {'pixel_values': torch.from_numpy(patches.copy()), 'spatial_shapes': torch.tensor([[4, 4]] * 3),
              'pixel_attention_mask': torch.ones(3, 16, dtype=torch.int64)}
  with torch.no_grad():
    text = made.get_text_features(tokens, **more)
    out = made(input_ids=tokens, **pixels, **more)
  return {'text': getattr(text, 'pooler_output', text).numpy(), 'logits': out.logits_per_image.numpy()}


KEPT = ('model_type', 'hidden_act', 'layer_norm_eps', 'num_attention_heads', 'image_size', 'patch_size',
        'num_patches')


def about(made: Any, found: dict[str, np.ndarray]) -> str:
  def kept(config: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k in KEPT}

  config = made.config.to_dict()
  own = {'model_type': config['model_type'], 'vision_config': kept(config['vision_config']),
         'text_config': kept(config['text_config'])}
  return json.dumps({'shapes': {k: list(v.shape) for k, v in found.items()}, 'config': own})


def main() -> None:
  train_clip()
  train_gemma()
  train_sentencepiece('siglip', 'spiece.model', model_type='unigram', vocab_size=100, eos_id=1, unk_id=2)
  train_sentencepiece('tips', 'tokenizer.model', model_type='bpe', vocab_size=350, eos_id=-1, unk_id=1,
                      byte_fallback=True)
  held: dict[str, np.ndarray] = {}
  for family in LENGTHS:
    ids = ids_of(family)
    made = model(family, {'clip': len(json.loads((FILES / 'clip/vocab.json').read_text()))}.get(family, 420))
    found = fill(made)
    held |= {f'{family}/about': np.array(about(made, found)), f'{family}/ids': ids.astype(np.int16)}
    held |= {f'{family}/{name}': x.astype(np.float32) for name, x in outputs(family, made, ids).items()}
    print(family, ids.shape, {name: x.shape for name, x in held.items() if name.startswith(f'{family}/')}, ids[2][:14])
    print('\n'.join(name for name in found if '.1.' not in name), file=sys.stderr)
  np.savez_compressed(HERE / 'golden_text.npz', **held)


if __name__ == '__main__':
  main()
