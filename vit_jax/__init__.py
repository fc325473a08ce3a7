"""Vision Transformers in JAX, from raw pictures to the tables of the paper."""
__version__ = '0.1.0'
