"""What a run says of itself at its end."""
from __future__ import annotations

from vit_jax.evaluate import final as results


def last_line(final: results.Final, seconds: float, page: str) -> str:
  """Returns the last line that a run prints."""
  if final.headline is None:
    return f'Done in {seconds:.0f} s, without an evaluation. Report: {page}'
  shown = f'{final.name}/{final.headline.headline}'
  shown += f' of the {final.view} weights' if final.view != 'student' else ''
  return (f'{shown}: {final.headline.score:.2%} of {final.headline.num_examples:,} images, '
          f'{seconds:.0f} s. Report: {page}')
