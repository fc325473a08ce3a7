"""LeJEPA on ImageNet-1k: views of an image are drawn together, all embeddings to a normal distribution; no teacher.

Data:     TFDS `imagenet2012`, or a folder: --config.data.source=folder:PATH; 1,281,167 images, only the k-NN
          evaluation during training uses labels.
Source:   arXiv 2511.08544, Algorithms 1 and 2: the characteristic function at 17 points of [-5, 5], trapezoid rule,
          weight 0.05 in a convex sum, invariance to the mean of the global views. Its program, rbalestr-lab/lejepa: the
          README has the crops and colors, 2 crops of 224 px (area 0.3 to 1) and 6 of 98 px (0.05 to 0.3), blur of half
          and solarization of a fifth of all crops, AdamW 5e-4, decay 0.05, cosine to a thousandth; the scripts of L/14
          (`launch_proj_ablation.md`, `launch_epps_ablation.md`) have batch 512, 100 epochs, stochastic depth 0.1, 1,024
          directions, and a projector to 512.
Differs:  The full program is not published. Its scripts have 238 px, a layer of 512 before the projector, an average of
          the network, and hide 0.3 of the patches; here there is none of these, as in Algorithm 2. Warm-up and
          projector are those of the minimal program, where weight decay acts on all parameters, here on matrices. H/14
          has the numbers of L/14.
Run:      python -m vit_jax.main --config=configs/lejepa_i1k.py:H/14 --workdir=runs/lejepa_h14
          --config.model.dtype=bfloat16
          Or L/14. Then --config.init_from=runs/lejepa_h14.
          A collapse is logged, and ends the run with --config.objective.collapse.action=stop.
Plan:     python -m vit_jax.main --job=plan --config=configs/lejepa_i1k.py:H/14 --topology=v3:8x8
          --config.model.dtype=bfloat16
Expected: the paper reports 79 % for a linear probe of H/14, the length of that run is not stated. Not run here.
"""
from vit_jax.config import schema as s
from vit_jax.recipes import sizes


def get_config(arguments: str = '') -> s.Config:
  """The run of H/14 or L/14."""
  given = s.parse_arg(arguments, size=('H/14', 'L/14'))
  model = sizes.vit(given['size'])
  model.gelu, model.drop_path, model.init = s.Gelu.EXACT, .1, s.Init.TIMM
  model.positions = s.Learned(resize=s.PositionResize.BICUBIC)  # small crops see positions of 7 x 7 tokens
  return s.Config(
      name=f'lejepa {given["size"]}', length='100 epochs', batch_size=512, image_px=(224, 224),
      data=s.Data(
          source='tfds:imagenet2012', eval_split='validation', num_examples=1_281_167, num_classes=1_000,
          recipe=s.Recipe(
              exif_orientation=s.Exif.FALSE,
              crop_sampler=s.CropSampler.TORCHVISION, crop_aspect=(.75, 4 / 3), flip=True,
              views=s.Views(on=True, num_local=6, global_area=(.3, 1.), local_area=(.05, .3), local_px=98,
                            blur=(.5, .5, .5), solarize=(.2, .2, .2), grayscale=.2,
                            jitter=s.Jitter(.4, .4, .2, .1, probability=.8)),
              interpolation=s.Interpolation.BICUBIC, antialias=True, eval_resize_px=256,
              eval_geometry=s.Geometry.TORCHVISION, mean=(.485, .456, .406), std=(.229, .224, .225))),
      model=model,
      objective=s.LeJepa(hidden_dim=2048, out_dim=512, weight=.05, directions=1024, t_max=5., t_points=9),
      optimizer=s.AdamW(lr=5e-4, b1=.9, b2=.999, weight_decay=.05, clip_norm=0.,
                        schedule=s.Schedule(s.Decay.COSINE, warmup='1 epoch', end_lr=5e-7)),
      evals={'knn': s.Knn(every='10 epochs'),
             'health': s.Health(every='1 epoch', images=4096, min_rank=2.)},
      checkpoints=s.Checkpoints(every='5 epochs'))
