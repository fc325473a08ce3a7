"""Interprets a pickle without Python's unpickler; only plain data and tensors with their storages are supported.

A pickle is a program for a stack machine that can import and call any name. The machine in this module imports and
calls nothing: a name becomes a record of its text, the few calls that weights need are implemented in this module, and
the instruction that changes objects (BUILD) has no effect. All objects that a pickle can reach are new for each read.
"""
from __future__ import annotations

import math
import pickletools
import re
from typing import Any, BinaryIO, NamedTuple

MOST_BYTES = 64 << 20  # of one pickle, which does not contain the data of tensors: that of DINOv2 g/14 has 0.2 MB
MOST_STEPS = 2_000_000  # instructions and copied items; a checkpoint with its optimizer's state takes about 0.1 million
MOST_AXES = 64  # as in NumPy
MOST_INDEX = 2**32  # of memorized objects; larger numbers only make the dictionary slow

STORAGES = ('FloatStorage', 'DoubleStorage', 'HalfStorage', 'BFloat16Storage', 'LongStorage', 'IntStorage',
            'ShortStorage', 'CharStorage', 'ByteStorage', 'BoolStorage')
_REBUILD, _PARAMETERS = 'torch._utils._rebuild_tensor_v2', ('torch._utils._rebuild_parameter',
                                                            'torch._utils._rebuild_parameter_with_state')
_DICT = 'collections.OrderedDict'
_HARMLESS = ('argparse.Namespace', 'torch.device', 'torch.Size', 'torch.dtype', 'pathlib.PosixPath', 'pathlib.Path',
             'numpy.dtype', 'numpy.core.multiarray.scalar', 'numpy._core.multiarray.scalar', '_codecs.encode',
             'torch.float32', 'torch.float16', 'torch.bfloat16')
"""Settings, devices and paths in checkpoints, which are not used here."""
_SHORT = re.compile(r'torch\.(_utils\._rebuild_(qtensor|tensor_v3)|qu?int\w+|per_\w+_affine\w*|ao\.nn\..*quantized.*)')
"""Names for quantized tensors, and for floating point of 8 bits."""
_KNOWN = frozenset((_REBUILD, *_PARAMETERS, _DICT, *_HARMLESS, *(f'torch.{name}' for name in STORAGES)))

_VALUES = {'NONE': None, 'NEWTRUE': True, 'NEWFALSE': False}
_ARGUMENTS = frozenset(('INT', 'LONG', 'BININT', 'BININT1', 'BININT2', 'LONG1', 'LONG4', 'FLOAT', 'BINFLOAT', 'UNICODE',
                        'BINUNICODE', 'SHORT_BINUNICODE', 'BINUNICODE8', 'BINBYTES', 'SHORT_BINBYTES', 'BINBYTES8'))
_OLD_TEXT = frozenset(('STRING', 'BINSTRING', 'SHORT_BINSTRING'))
_NUMBERED = {'TUPLE1': 1, 'TUPLE2': 2, 'TUPLE3': 3}


class Refused(Exception):
  """A pickle that uses an unsupported class, function or instruction."""


class Name(NamedTuple):
  """A class or function that a pickle names; nothing is imported."""
  full: str


OTHER = Name('')
"""Replaces every object that is not used here."""


class Storage(NamedTuple):
  """The data of tensors: `kind` of `STORAGES`, `key` in the file, `size` in elements."""
  kind: str
  key: str
  size: int


class Tensor(NamedTuple):
  """A view of a storage; `offset` and `strides` in elements. It lies inside the storage and is at most as large."""
  storage: Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


def load(file: BinaryIO, kinds: dict[str, str] | None = None) -> Any:
  """Returns the object that a pickle describes, made of dicts (with text as keys), lists, tuples, text, numbers,
  `Storage`, `Tensor` and `OTHER`.

  Args:
    file: at the pickle's start; it is read to the pickle's end and no further.
    kinds: receives the kind of every storage by its key.

  Raises:
    Refused: the pickle names something that weights do not need; it is neither imported nor run.
    ValueError: the pickle is damaged, or larger than `MOST_BYTES` or `MOST_STEPS` allow.
  """
  machine = _Machine({} if kinds is None else kinds)
  for opcode, argument, _ in pickletools.genops(_Bounded(file)):  # type: ignore[arg-type]
    if opcode.name == 'STOP':
      break
    machine.spend(1)
    machine.run(opcode.name, argument)
  return machine.pop()


class _Bounded:
  """A file that ends after `MOST_BYTES`, so that a length inside a pickle cannot allocate more memory."""

  def __init__(self, file: BinaryIO) -> None:
    self._file, self._left = file, MOST_BYTES

  def read(self, size: int) -> bytes:
    return self._counted(self._file.read(min(size, self._left)) if self._left else b'')

  def readline(self) -> bytes:
    return self._counted(self._file.readline(self._left))

  def _counted(self, data: bytes) -> bytes:
    self._left -= len(data)
    if not self._left:
      raise ValueError(f'its pickle is longer than {MOST_BYTES >> 20} MiB')
    return data


class _Machine:
  """The state of the stack machine: the stack, the stacks below its marks, and the memorized objects."""

  def __init__(self, kinds: dict[str, str]) -> None:
    self._kinds = kinds
    self._stack: list[Any] = []
    self._below: list[list[Any]] = []
    self._memo: dict[int, Any] = {}
    self._steps = 0

  def spend(self, steps: int) -> None:
    """Counts steps; raises ValueError after `MOST_STEPS`."""
    self._steps += steps
    if self._steps > MOST_STEPS:
      raise ValueError(f'its pickle takes more than {MOST_STEPS:,} steps')

  def pop(self) -> Any:
    if not self._stack:
      raise ValueError('its pickle takes from an empty stack')
    return self._stack.pop()

  def run(self, name: str, argument: Any) -> None:
    """Executes one instruction."""
    if name in _VALUES:
      self._stack.append(_VALUES[name])
    elif name in _ARGUMENTS:
      self._stack.append(argument)
    elif name in _OLD_TEXT:  # bytes of Python 2, which pickletools decodes as Latin-1
      self._stack.append(argument.encode('latin-1').decode('utf-8', 'replace'))
    elif name in _NUMBERED:
      self._stack.append(tuple(reversed([self.pop() for _ in range(_NUMBERED[name])])))
    elif name in ('GLOBAL', 'STACK_GLOBAL', 'REDUCE', 'NEWOBJ', 'NEWOBJ_EX', 'BUILD', 'BINPERSID'):
      self._stack.append(self._object(name, argument))
    elif name in ('APPEND', 'APPENDS', 'SETITEM', 'SETITEMS', 'ADDITEMS'):
      self._fill(name)
    elif name in ('MEMOIZE', 'PUT', 'BINPUT', 'LONG_BINPUT', 'GET', 'BINGET', 'LONG_BINGET'):
      self._remember(name, argument)
    elif name not in ('PROTO', 'FRAME'):
      self._collect(name)

  def _items(self) -> list[Any]:
    """Removes and returns the objects above the last mark."""
    if not self._below:
      raise ValueError('its pickle has no mark where one is needed')
    items, self._stack = self._stack, self._below.pop()
    return items

  def _collect(self, name: str) -> None:
    """Executes an instruction for containers or marks."""
    match name:
      case 'MARK':
        self._below.append(self._stack)
        self._stack = []
      case 'POP' if not self._stack:
        self._items()
      case 'POP':
        self.pop()
      case 'POP_MARK':
        self._items()
      case 'EMPTY_TUPLE' | 'EMPTY_LIST' | 'EMPTY_DICT':
        self._stack.append({'EMPTY_TUPLE': tuple, 'EMPTY_LIST': list, 'EMPTY_DICT': dict}[name]())
      case 'EMPTY_SET':
        self._stack.append(OTHER)
      case 'FROZENSET':
        self._items()
        self._stack.append(OTHER)
      case 'TUPLE' | 'LIST' | 'DICT':
        items = self._items()
        self._stack.append(items if name == 'LIST' else tuple(items) if name == 'TUPLE' else _paired(items))
      case _:
        raise ValueError(f'its pickle has the instruction {name}, which no file of PyTorch has')

  def _fill(self, name: str) -> None:
    """Adds items to a list or dict of this read; other objects stay unchanged."""
    items = self._items() if name.endswith('S') else [self.pop()]
    items = [self.pop(), *items] if name == 'SETITEM' else items
    target = self._stack[-1] if self._stack else None
    if type(target) is list and name.startswith('APPEND'):
      target += items
    elif type(target) is dict and name.startswith('SETITEM'):
      target |= _paired(items)
    elif target is not OTHER:
      raise ValueError(f'its pickle adds to a {type(target).__name__} with {name}')

  def _remember(self, name: str, argument: Any) -> None:
    index = len(self._memo) if name == 'MEMOIZE' else argument
    if name.endswith('GET'):
      if index not in self._memo:
        raise ValueError(f'its pickle uses object {str(index)[:20]} before it was memorized')
      self._stack.append(self._memo[index])
    elif not 0 <= index < MOST_INDEX or not self._stack:
      raise ValueError('its pickle memorizes an object that is not there')
    else:
      self._memo[index] = self._stack[-1]

  def _object(self, name: str, argument: Any) -> Any:
    """Executes an instruction for a name, a call or a storage; BUILD leaves its object unchanged."""
    match name:
      case 'GLOBAL':
        return _known(argument.replace(' ', '.', 1))
      case 'STACK_GLOBAL':
        last, module = self.pop(), self.pop()
        if type(last) is not str or type(module) is not str:
          raise ValueError('its pickle names something without text')
        return _known(f'{module}.{last}')
      case 'BINPERSID':
        storage = _storage(self.pop())
        if self._kinds.setdefault(storage.key, storage.kind) != storage.kind:
          raise ValueError(f'storage {storage.key[:20]!r} is of two kinds')
        return storage
      case 'BUILD':
        self.pop()
        return self.pop()
      case 'NEWOBJ_EX':
        self.pop()
    arguments = self.pop()
    return self._call(self.pop(), arguments)

  def _call(self, function: Any, arguments: Any) -> Any:
    if type(function) is not Name or type(arguments) is not tuple:
      raise ValueError(f'its pickle calls a {type(function).__name__}')
    if function.full == _REBUILD:
      return _tensor(arguments)
    if function.full in _PARAMETERS and arguments and type(arguments[0]) is Tensor:
      return arguments[0]
    if function.full == _DICT:
      pairs = arguments[0] if arguments else ()
      if type(pairs) not in (list, tuple) or any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError('its pickle makes a dictionary of something else than pairs')
      self.spend(len(pairs))
      return {key: value for key, value in pairs if type(key) is str}
    if function.full in _HARMLESS:
      return OTHER
    raise ValueError(f'its pickle calls {function.full or "an object"} with other arguments than PyTorch does')


def _paired(items: list[Any]) -> dict[str, Any]:
  """Returns a dict of alternating keys and values; only text keys are kept, since only they can name tensors."""
  if len(items) % 2:
    raise ValueError('its pickle has a key without a value')
  return {key: value for key, value in zip(items[::2], items[1::2], strict=True) if type(key) is str}


def _known(full: str) -> Name:
  if full not in _KNOWN:
    if _SHORT.fullmatch(full):
      raise Refused(f'quantized tensors, or others of 8 bits ({full}). Use the weights from before the quantization.')
    shown = full if full.isprintable() and len(full) < 100 else ascii(full)[:100]
    raise Refused(f'a pickle that asks to run {shown}. Nothing of it was run; do not use files from people you do not '
                  'trust. If it is a whole model or TorchScript, write its tensors with the program that it is from, '
                  "torch.save(model.state_dict(), 'weights.pth'), and use that file.")
  return Name(full)


def _storage(pid: Any) -> Storage:
  """Returns the storage of a persistent id `('storage', type, key, device, size)`; older files add a sixth value."""
  if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != 'storage' or type(pid[1]) is not Name:
    raise ValueError(f'its pickle refers to a storage by a {type(pid).__name__}')
  kind, key, size = pid[1].full.removeprefix('torch.'), pid[2], pid[4]
  if kind not in STORAGES or type(key) not in (str, int) or type(size) is not int or not 0 <= size < 2**63:
    raise ValueError('its pickle describes a storage that cannot be')
  return Storage(kind, str(key), size)


def _tensor(arguments: tuple[Any, ...]) -> Tensor:
  """Returns a tensor of `(storage, offset, shape, strides, …)`; `requires_grad` and hooks are ignored."""
  if len(arguments) < 4 or type(arguments[0]) is not Storage or type(arguments[1]) is not int:
    raise ValueError('its pickle describes a tensor that cannot be')
  storage, offset, shape, strides = arguments[:4]
  if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides) <= MOST_AXES and offset >= 0):
    raise ValueError('its pickle describes a tensor with a shape or strides that cannot be')
  numbers = math.prod(shape)
  if numbers and offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= storage.size:
    raise ValueError(f'a tensor of shape {list(shape)} reaches beyond its {storage.size:,} numbers')
  if numbers > storage.size:
    raise ValueError(f'a tensor of shape {list(shape)} repeats its {storage.size:,} numbers; save a contiguous copy')
  return Tensor(storage, offset, shape, strides)


def _are_sizes(values: Any) -> bool:
  return type(values) is tuple and len(values) <= MOST_AXES and all(
      type(value) is int and 0 <= value < 2**63 for value in values)
