"""Packaging. `configs/` is installed as `vit_jax.configs`, and `benchmarks/records/` as `vit_jax.records`: recipes and
records are known by name anywhere."""
import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent
SOURCE = 'https://github.com/OWNER/vit_jax'


def read_version() -> str:
  text = (ROOT / 'vit_jax' / '__init__.py').read_text(encoding='utf-8')
  found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
  assert found, 'vit_jax/__init__.py has no __version__'
  return found.group(1)


def list_packages() -> list[str]:
  configs = setuptools.find_packages(str(ROOT / 'configs'))
  return [*setuptools.find_packages(str(ROOT), include=['vit_jax', 'vit_jax.*']),
          'vit_jax.configs', *(f'vit_jax.configs.{name}' for name in configs), 'vit_jax.records']


def read_readme() -> str:
  """Returns the README with addresses in place of the relative links, which lead nowhere from a package."""
  text = (ROOT / 'README.md').read_text(encoding='utf-8')
  text = re.sub(r'(!\[[^]]*\]\(|src=")(?!\w+:)', rf'\g<1>{SOURCE}/raw/main/', text)
  return re.sub(r'(?<!!)(\[(?:[^][]|\[[^]]*\])*\]\()(?![\w+.-]+:|#)', rf'\g<1>{SOURCE}/blob/main/', text)


setuptools.setup(
  name='vit-jax',
  version=read_version(),
  description='Vision Transformers in JAX, from image files to the tables of the paper',
  long_description=read_readme(),
  long_description_content_type='text/markdown',
  author='The vit_jax authors',
  license='Apache-2.0',
  license_files=['LICENSE'],
  project_urls={'Source': SOURCE, 'Paper': 'https://arxiv.org/abs/2010.11929'},
  keywords='vision transformer, ViT, JAX, Flax, image classification, self-supervised learning, TPU',
  classifiers=[
    'Development Status :: 4 - Beta',
    'Intended Audience :: Science/Research',
    'Programming Language :: Python :: 3.11',
    'Programming Language :: Python :: 3.12',
    'Programming Language :: Python :: 3.13',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Topic :: Scientific/Engineering :: Image Recognition',
    'Typing :: Typed',
  ],
  packages=list_packages(),
  # An editable install honors this mapping only for folders with an __init__.py.
  package_dir={'vit_jax': 'vit_jax', 'vit_jax.configs': 'configs', 'vit_jax.records': 'benchmarks/records'},
  package_data={'vit_jax.records': ['*.json'], 'vit_jax': ['py.typed'], 'vit_jax.inspect': ['templates/*'],
                'vit_jax.data.labels': ['imagenet_*.txt', 'LICENSE_WORDNET'],
                'vit_jax.recipes': ['network_costs.json'],
                'vit_jax.weights': ['published.txt'],
                'vit_jax.data.text': ['templates.json', 'clip_imagenet_names.txt']},
  python_requires='>=3.11',
  # Each bound is a version that exists; `bash launch/test.sh --lowest` installs exactly these. With jax 0.10.0 no step
  # is compiled: abstract devices have no platform there.
  install_requires=[
    'absl-py>=2.1',
    'array_record>=0.8.1',
    'chex>=0.1.90',  # assertions on shapes and trees
    'etils[epath]>=1.12',
    'flax>=0.12',
    'google-crc32c>=1.5',
    'grain>=0.2.18',
    'huggingface_hub>=1.0',
    'importlib_resources>=6.0',  # which the builders of tensorflow-datasets import and it does not require
    'protobuf>=5.28.3',
    'jax>=0.10.1',
    'jinja2>=3.1',
    'matplotlib>=3.9',
    'ml-collections>=1.0',
    'msgpack>=1.1',
    'numpy>=2.0',
    'opencv-python-headless>=4.10.0.84',
    'optax>=0.2.8',
    'orbax-checkpoint>=0.12',
    'pillow>=11.0',
    'pyarrow>=17.0',  # lists of image files, indexes, Parquet
    'rich>=13.7',
    'scikit-learn>=1.5',
    'shtab>=1.7',  # shell completion
    'tensorboardX>=2.6.2',  # event files of runs
    'tensorflow-datasets>=4.9.7',
    'tensorstore>=0.1.84',
  ],
  extras_require={
    'test': ['equinox>=0.11', 'mypy>=1.13', "nvidia-nvimgcodec-cu12>=0.9; sys_platform == 'linux'", 'onnx>=1.16',
             'onnxruntime>=1.18', 'ipykernel>=6.29', 'nbclient>=0.10', 'nbformat>=5.10', 'pandas>=2.2.2',
             'pytest>=8.3', 'pytest-timeout>=2.3', 'pytest-xdist>=3.6', 'pyyaml>=6.0', 'ruff>=0.8',
             'safetensors>=0.5', 'sentencepiece>=0.2', 'setuptools>=77', 'starlette>=0.40',
             'tifffile>=2024.2', 'tokenizers>=0.20', 'uvicorn>=0.30'],
    # the documentation site
    'docs': ['mkdocs>=1.6,<2', 'mkdocs-material>=9.6', 'mkdocstrings[python]>=0.29', 'mike>=2.1'],
    'crop': ["nvidia-nvimgcodec-cu12>=0.9; sys_platform == 'linux'"],  # decodes parts of a JPEG; needs no GPU
    'tfds': ['tensorflow>=2.18'],  # to prepare sets whose builders need it; nothing else does
    'plan': ["libtpu>=0.0.51; sys_platform == 'linux'"],  # the TPU compiler, for --job=plan on any machine
    'plan-gpu': ['jax[cuda13]>=0.10.1'],  # XLA's compiler for GPUs, likewise; no GPU and no driver is needed
    'onnx': ['onnx>=1.16', 'onnxruntime>=1.18'],  # to export networks, and to run what was exported
    'text': ['sentencepiece>=0.2', 'tokenizers>=0.20'],  # tokenizers of CLIP, SigLIP and TIPS
    'serve': ['starlette>=0.40', 'uvicorn>=0.30'],  # the live page of `vit-jax serve`
    'tiff': ['tifffile>=2024.2'],  # images of several channels
    'beam': ['apache-beam>=2.60'],  # `vit-jax prepare --runner`; Dataflow needs apache-beam[gcp]
    'wandb': ['wandb>=0.17'],  # trackers of runs
    'mlflow': ['mlflow-skinny>=2.14', 'sqlalchemy>=2.0', 'alembic>=1.10'],
    'gcs': ['gcsfs>=2025.2'],  # run directories on gs://
    'tpu': ['jax[tpu]>=0.10.1', 'gcsfs>=2025.2'],
    'gpu': ['jax[cuda13]>=0.10.1'],
    'gpu12': ['jax[cuda12]>=0.10.1'],
  },
  entry_points={'console_scripts': ['vit-jax = vit_jax.main:program']},
)
