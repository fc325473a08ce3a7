"""Docstrings of functions as whole sentences in the third person: "Returns the mean over valid examples."

`python -m tests.sentences [PACKAGE …]` lists those that begin with another word than a verb of `VERBS`.
"""
from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / 'vit_jax'
VERBS = """
    Adds Advances Answers Appends Applies Arranges Averages Begins Blends Bounds Builds Calls Changes Checks
    Chooses Classifies Clears Clips Closes Compares Compiles Computes Constrains Converts Copies Counts Creates
    Declares Decodes Describes Discards Divides Does Downloads Draws Encodes Ends Equalizes Erases Evaluates
    Executes Exports Fills Finds Fine-tunes Fits Formats Gathers Holds Imports Inspects Inverts Joins Keeps Labels
    Lists Loads Locks Logs Makes Maps Marks Measures Mirrors Mixes Moves Multiplies Normalizes Notes Opens Parses
    Places Plans Predicts Prepares Prints Publishes Raises Reads Reconstructs Records Refuses Removes Replaces
    Replays Reports Resizes Restores Returns Rotates Runs Samples Saves Scales Scores Sends Serializes Serves Sets
    Shows Silences Smooths Splits Starts Stops Stores Stretches Sums Takes Tells Times Trains Updates Uploads
    Verifies Waits Warns Writes Yields Zeroes"""


def begins_with_verb(text: str) -> bool:
  """Whether a docstring begins with a verb in the third person."""
  return text.split()[0].strip('`,.:') in VERBS.split()


def fragments(folder: pathlib.Path) -> Iterator[str]:
  """`FILE:LINE FUNCTION: FIRST LINE` of each public function of a package whose docstring begins otherwise.

  Properties are left out: they are named by nouns.
  """
  for path in sorted(folder.rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith('_'):
        continue
      text = ast.get_docstring(node)
      is_property = any('property' in ast.unparse(one) for one in node.decorator_list)
      if text and not is_property and not begins_with_verb(text):
        yield f'{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}: {text.splitlines()[0]}'


if __name__ == '__main__':
  for name in sys.argv[1:] or sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()):
    print(*fragments(PACKAGE / name), sep='\n')
