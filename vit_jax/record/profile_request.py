"""The files by which a running run is asked for profiles: `profile/request.json` and `profile/answer.json`.

`jobs/profile.py` writes the request and reads the answer, `train/profile_requests.py` does the reverse.
"""
from __future__ import annotations

import json
import time
from typing import NamedTuple

from vit_jax.core import json_text

FOLDER, REQUEST, ANSWER = 'profile', 'request.json', 'answer.json'


class Request(NamedTuple):
  """A request: its id, the processes to trace, the number of steps, and the time (Unix) after which it is void."""
  id: str
  hosts: tuple[int, ...]
  steps: int
  until_s: float

  def to_json(self) -> str:
    """Returns the text of the file."""
    return json.dumps(self._asdict())


def parse(text: str) -> Request | None:
  """Reads a request; None if the text is not one, or the request is void."""
  try:
    found = json_text.parse(text)
    request = Request(str(found['id']), tuple(int(one) for one in found['hosts']), int(found['steps']),
                      float(found['until_s']))
  except (ValueError, TypeError, KeyError):
    return None
  return request if time.time() < request.until_s and request.steps > 0 else None
