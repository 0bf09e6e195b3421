"""mpi4py's datatypes as layouts of rampool's direct view, by decoding them, not by packing.

    from mpi4py import MPI
    import rampool_mpi

    direct = rampool_mpi.Direct(server="memhost1=4G")
    region = direct.region("lattice", 1 << 30)
    face = MPI.DOUBLE.Create_vector(64, 1, 64)
    direct.put(region, array, datatype=face, offset=0)  # the bytes of the face, one after the other there
    direct.get(region, array, datatype=face, offset=0, there=(1, face))

Pure Python over librampool.so (ctypes); mpi4py is needed for datatypes only, and nothing communicates. A
`Layout` is what a datatype selects; `Layout.of(datatype)` asks MPI for the constructors a datatype was made
of (`Get_envelope`, `Get_contents`) and repeats them. All of MPI 3 are understood. RAMPOOL_LIBRARY names the
library where the loader does not find it.
"""

import ctypes
import os

__all__ = ["Layout", "Direct", "Region", "RampoolError"]

_u64, _i64, _size, _ptr, _text = (
    ctypes.c_uint64, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
)
_out = ctypes.POINTER(_ptr)
# Name: arguments, and the return type if it is not a status.
_FUNCTIONS = {
    "rampool_error_message": ([], _text),
    "rampool_builder_new": ([], _ptr),
    "rampool_builder_set": ([_ptr, _text, _text], None),
    "rampool_builder_free": ([_ptr], _ptr),
    "rampool_layout_bytes": ([_u64, _out], None),
    "rampool_layout_contiguous": ([_ptr, _u64, _out], None),
    "rampool_layout_vector": ([_ptr, _u64, _u64, _i64, _out], None),
    "rampool_layout_hvector": ([_ptr, _u64, _u64, _i64, _out], None),
    "rampool_layout_indexed": ([_ptr, _size, _ptr, _ptr, _out], None),
    "rampool_layout_hindexed": ([_ptr, _size, _ptr, _ptr, _out], None),
    "rampool_layout_struct": ([_size, _ptr, _ptr, _ptr, _out], None),
    "rampool_layout_subarray": ([_ptr, _size, _ptr, _ptr, _ptr, ctypes.c_uint32, _out], None),
    "rampool_layout_resized": ([_ptr, _i64, _i64, _out], None),
    "rampool_layout_size": ([_ptr], _u64),
    "rampool_layout_extent": ([_ptr], _i64),
    "rampool_layout_lower": ([_ptr], _i64),
    "rampool_layout_pack": ([_ptr, _ptr, _ptr], _ptr),
    "rampool_layout_free": ([_ptr], _ptr),
    "rampool_direct_open": ([_ptr, _out], None),
    "rampool_direct_close": ([_ptr], _ptr),
    "rampool_direct_open_region": ([_ptr, _text, _u64, _out], None),
    "rampool_direct_region_bytes": ([_ptr], _u64),
    "rampool_direct_region_close": ([_ptr], _ptr),
    "rampool_direct_region_free": ([_ptr, _ptr], _ptr),
    "rampool_direct_put_layout": ([_ptr, _ptr, _u64, _ptr, _ptr, _ptr], None),
    "rampool_direct_get_layout": ([_ptr, _ptr, _u64, _ptr, _ptr, _ptr], None),
}
_RANGES = {
    ctypes.c_uint32: (0, 1 << 32), _u64: (0, 1 << 64), _size: (0, 1 << 64), _i64: (-(1 << 63), 1 << 63),
}
_library = None


class RampoolError(Exception):
    """An error of the library, or an unsupported MPI datatype."""


def _call(name, *arguments):
    global _library
    if _library is None:
        loaded = ctypes.CDLL(os.environ.get("RAMPOOL_LIBRARY", "librampool.so"))
        for function, (takes, gives) in _FUNCTIONS.items():
            known = getattr(loaded, function)
            known.argtypes, known.restype = takes, gives or ctypes.c_int
        _library = loaded
    answer = getattr(_library, name)(*map(_checked, _FUNCTIONS[name][0], arguments))
    if _FUNCTIONS[name][1] is None and answer != 0:
        raise RampoolError(_library.rampool_error_message().decode())
    return answer


def _checked(kind, value):
    """The value, if it fits C's type: ctypes would truncate it."""
    if kind is _text and b"\0" in value:
        raise RampoolError(f"{value.decode()!r} has a NUL byte in it")
    if kind in _RANGES and isinstance(value, int) and not _RANGES[kind][0] <= value < _RANGES[kind][1]:
        raise RampoolError(f"{value} is not from {_RANGES[kind][0]} to {_RANGES[kind][1] - 1}")
    return value


def _made(name, *arguments):
    handle = _ptr()
    _call(name, *arguments, ctypes.byref(handle))
    return handle


def _array(kind, items):
    items = [_checked(kind, item) for item in items]
    # An empty array has an address too, which is not used.
    return (kind * max(len(items), 1))(*items)


class Layout:
    """Which bytes, in which order, as in MPI's derived datatypes. Immutable."""

    def __init__(self, handle):
        self._handle = handle

    def __del__(self):
        if getattr(self, "_handle", None):
            _call("rampool_layout_free", self._handle)

    @classmethod
    def bytes(cls, count):
        return cls(_made("rampool_layout_bytes", count))

    def contiguous(self, count):
        return Layout(_made("rampool_layout_contiguous", self._handle, count))

    def vector(self, count, block, stride):
        return Layout(_made("rampool_layout_vector", self._handle, count, block, stride))

    def hvector(self, count, block, stride):
        return Layout(_made("rampool_layout_hvector", self._handle, count, block, stride))

    def indexed(self, blocks, displacements):
        return Layout(
            _made(
                "rampool_layout_indexed", self._handle, len(blocks), _array(_u64, blocks),
                _array(_i64, displacements),
            )
        )

    def hindexed(self, blocks, displacements):
        return Layout(
            _made(
                "rampool_layout_hindexed", self._handle, len(blocks), _array(_u64, blocks),
                _array(_i64, displacements),
            )
        )

    @classmethod
    def struct(cls, counts, displacements, layouts):
        fields = _array(_ptr, (layout._handle.value for layout in layouts))
        return cls(
            _made(
                "rampool_layout_struct", len(layouts), _array(_u64, counts), _array(_i64, displacements),
                fields,
            )
        )

    def subarray(self, sizes, subsizes, starts, fortran=False):
        sides = [_array(_u64, side) for side in (sizes, subsizes, starts)]
        return Layout(_made("rampool_layout_subarray", self._handle, len(sizes), *sides, int(fortran)))

    def distributed(self, dimensions):
        """In each dimension, (size, block, place, processes), the blocks that the process at `place` has. The
        elements of the first lie next to each other."""
        whole, stride = self, self.extent
        for size, block, place, processes in dimensions:
            starts = range(place * block, size, block * processes)
            lengths = [min(block, size - start) for start in starts]
            whole = whole.resized(0, stride).hindexed(lengths, [start * stride for start in starts])
            stride *= size
        return whole

    def resized(self, lower, extent):
        return Layout(_made("rampool_layout_resized", self._handle, lower, extent))

    @property
    def size(self):
        return _call("rampool_layout_size", self._handle)

    @property
    def extent(self):
        return _call("rampool_layout_extent", self._handle)

    @property
    def lower(self):
        return _call("rampool_layout_lower", self._handle)

    def pack(self, address):
        """The bytes that it selects from an address on. You make sure that the address is valid."""
        packed = ctypes.create_string_buffer(max(self.size, 1))
        _call("rampool_layout_pack", self._handle, address, ctypes.addressof(packed))
        return packed.raw[: self.size]

    @classmethod
    def of(cls, datatype):
        """The layout of one element of an mpi4py datatype."""
        from mpi4py import MPI

        envelope = datatype.Get_envelope()
        combiner = envelope[3] if len(envelope) == 4 else envelope[4]
        if combiner in (
            MPI.COMBINER_NAMED, MPI.COMBINER_F90_REAL, MPI.COMBINER_F90_COMPLEX, MPI.COMBINER_F90_INTEGER
        ):
            bare = cls._named(datatype, MPI)
        else:
            contents = datatype.Get_contents()
            integers, addresses, types = list(contents[0]), list(contents[1]), contents[-1]
            # Large counts, where this MPI has them, stand between addresses and types.
            if len(contents) == 4 and list(contents[2]):
                raise RampoolError("datatypes with large counts are not understood")
            parts = [cls.of(part) for part in types]
            for part in types:
                if not part.is_predefined:
                    part.Free()
            bare = cls._built(combiner, integers, addresses, parts, MPI)
        lower, extent = datatype.Get_extent()
        return bare.resized(lower, extent)

    @classmethod
    def _named(cls, datatype, MPI):
        if datatype == MPI.SHORT_INT:
            # The only pair with a hole inside.
            return cls.bytes(1).hindexed(
                [ctypes.sizeof(ctypes.c_short), ctypes.sizeof(ctypes.c_int)],
                [0, ctypes.alignment(ctypes.c_int)],
            )
        return cls.bytes(datatype.Get_size())

    @classmethod
    def _built(cls, combiner, i, a, parts, MPI):
        part, count = (parts or [None])[0], (i or [0])[0]
        if combiner in (MPI.COMBINER_DUP, MPI.COMBINER_RESIZED):
            return part
        if combiner == MPI.COMBINER_CONTIGUOUS:
            return part.contiguous(count)
        if combiner == MPI.COMBINER_VECTOR:
            return part.vector(*i)
        if combiner == MPI.COMBINER_HVECTOR:
            return part.hvector(count, i[1], a[0])
        if combiner == MPI.COMBINER_INDEXED:
            return part.indexed(i[1 : 1 + count], i[1 + count :])
        if combiner == MPI.COMBINER_HINDEXED:
            return part.hindexed(i[1:], a)
        if combiner == MPI.COMBINER_INDEXED_BLOCK:
            return part.indexed([i[1]] * count, i[2:])
        if combiner == MPI.COMBINER_HINDEXED_BLOCK:
            return part.hindexed([i[1]] * count, a)
        if combiner == MPI.COMBINER_STRUCT:
            return cls.struct(i[1:], a, parts)
        if combiner == MPI.COMBINER_SUBARRAY:
            sides = [i[1 + n * count : 1 + (n + 1) * count] for n in range(3)]
            return part.subarray(*sides, fortran=i[-1] == MPI.ORDER_FORTRAN)
        if combiner == MPI.COMBINER_DARRAY:
            return part.distributed(_distribution(i, MPI))
        raise RampoolError(f"a datatype was made by a constructor that is not known here ({combiner})")


def _distribution(integers, MPI):
    """The dimensions of `Layout.distributed` of what MPI says of a distributed array."""
    _, rank, count = integers[:3]
    sizes, ways, lengths, grid = (integers[3 + n * count : 3 + (n + 1) * count] for n in range(4))
    dimensions, behind = [], 1
    for size, way, block, processes in reversed(list(zip(sizes, ways, lengths, grid))):
        if way == MPI.DISTRIBUTE_NONE:
            block = size
        elif block == MPI.DISTRIBUTE_DFLT_DARG:
            block = -(-size // processes) if way == MPI.DISTRIBUTE_BLOCK else 1
        dimensions.append((size, block, rank // behind % processes, processes))
        behind *= processes
    return dimensions[::-1] if integers[-1] == MPI.ORDER_FORTRAN else dimensions


class Region:
    """A region of the direct view."""

    def __init__(self, handle):
        self._handle = handle

    def __del__(self):
        if getattr(self, "_handle", None):
            _call("rampool_direct_region_close", self._handle)

    def __len__(self):
        return _call("rampool_direct_region_bytes", self._handle)


class Direct:
    """One thread's connection to the bytes of regions. Options are those of rampool_builder_set, `-` written
    `_`: `Direct(server="memhost1=4G", zero_copy="off")`."""

    def __init__(self, **options):
        self._handle = None
        builder = _call("rampool_builder_new")
        try:
            for name, value in options.items():
                _call("rampool_builder_set", builder, name.replace("_", "-").encode(), str(value).encode())
            self._handle = _made("rampool_direct_open", builder)
        finally:
            _call("rampool_builder_free", builder)

    def close(self):
        if getattr(self, "_handle", None):
            _call("rampool_direct_close", self._handle)
            self._handle = None

    __del__ = close

    def _open(self):
        if self._handle is None:
            raise RampoolError("this Direct is closed")
        return self._handle

    def region(self, name, size=0):
        """Opens the region of this name, or creates it, all zero, if it does not exist and a size is
        given."""
        return Region(_made("rampool_direct_open_region", self._open(), name.encode(), size))

    def put(self, region, buffer, datatype=None, count=1, offset=0, there=None):
        """Writes `count` elements of a datatype (all of the buffer, without one) to the bytes that `there`, a
        (count, datatype), selects from `offset` of the region on; one byte after the other where that is not
        given."""
        self._move(
            "rampool_direct_put_layout", region, buffer, datatype, count, offset, there, writable=False
        )

    def get(self, region, buffer, datatype=None, count=1, offset=0, there=None):
        """Reads into `count` elements of a datatype the bytes that `there` selects from `offset` of the
        region on."""
        self._move("rampool_direct_get_layout", region, buffer, datatype, count, offset, there, writable=True)

    def _move(self, function, region, buffer, datatype, count, offset, there, writable):
        from mpi4py import MPI

        try:
            # Called `memory` before mpi4py 4.
            view = (MPI.buffer if hasattr(MPI, "buffer") else MPI.memory).frombuffer(
                buffer, readonly=not writable
            )
        except BufferError as error:
            raise RampoolError(f"the buffer cannot be used: {error}") from error
        here = Layout.bytes(view.nbytes) if datatype is None else Layout.of(datatype).contiguous(count)
        if datatype is not None:
            lower, extent = datatype.Get_true_extent()
            step = datatype.Get_extent()[1]
            if here.size and (lower < 0 or max(0, count - 1) * step + lower + extent > view.nbytes):
                raise RampoolError(
                    f"{count} elements of the datatype reach outside of the buffer's {view.nbytes} bytes"
                )
        target = Layout.bytes(here.size) if there is None else Layout.of(there[1]).contiguous(there[0])
        _call(function, self._open(), region._handle, offset, target._handle, view.address, here._handle)
