"""A plain ViT on synthetic images, to measure the speed of a machine: for `benchmarks.bench`.

Data:     none; images of noise, 1,000 classes.
Differs:  It follows no paper.
Run:      python -m benchmarks.bench --config=configs/bench.py --models=S/16,B/16 --to=DIR
          --config=configs/bench.py:bf16 computes in bfloat16, which accelerators need for speed, and then
          --config.model.attention.kernel=cudnn attends by cuDNN's kernel on GPUs, and
          --config.model.attention.kernel=fused --config.model.mlp.kernel=fused computes by Pallas kernels on TPU v6e;
          --search finds the largest batch;
          --against=timm,transformers times those in the same run.
          To compare ways of running the blocks:
          --config.model.execution=scan, or with it --config.model.unroll=2; the products of blocks in int8 or fp8:
          --config.model.quantize=int8.
          With images of your own:
          --config.data.source=folder:PATH --config.data.num_classes=0 --config.data.num_examples=0
Expected: a table of milliseconds, images/s and utilization, with what a large product reaches beside it.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run, in `f32` or `bf16`."""
  dtype = s.parse_arg(arguments, dtype=('f32', 'bf16'))['dtype']
  model = sizes.vit('S/16')
  model.dtype = s.DType.BF16 if dtype == 'bf16' else s.DType.F32
  return s.Config(
      name='ViT-S/16', length='100 steps', batch_size=4, image_px=(224, 224),
      data=s.Data(source='synthetic', num_examples=256, num_classes=1_000),
      model=model,
      objective=s.Supervised(loss=s.Loss.SOFTMAX, label_smoothing=0.),
      optimizer=s.AdamW(lr=1e-3, b1=.9, b2=.999, weight_decay=.1, clip_norm=1.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='5 %')))
