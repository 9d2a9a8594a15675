"""A producer of DLPack capsules in ctypes, which can also produce wrong ones, and counts how often it is deleted."""

import ctypes

CPU = 1
GPU = 2


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plain(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", Deleter)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


def _new(pointer, name):
    return ctypes.pythonapi.PyCapsule_New(pointer, name, None)


ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

#: Names of capsules must outlive them.
NAMES = {False: b"dltensor", True: b"dltensor_versioned"}

FLOAT32 = (2, 32, 1)


class Producer:
    """Eight float32 by default; every fact about it can be a lie."""

    def __init__(self, values=(0.0,) * 8, *, versioned=True, **lies):
        self.memory = (ctypes.c_float * len(values))(*values)
        self.versioned = versioned
        self.lies = lies
        self.deleted = 0
        self.exports = []
        self.asked = []

    @property
    def values(self):
        return list(self.memory)

    def __dlpack_device__(self):
        return self.lies.get("says_device", self.lies.get("device", (CPU, 0)))

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        if not self.versioned and keywords and not self.lies.get("takes_keywords"):
            raise TypeError("__dlpack__() takes no keyword arguments")
        if "raises" in self.lies:
            raise self.lies["raises"]
        if "gives" in self.lies:
            return self.lies["gives"]
        return self.capsule()

    def capsule(self):
        lies = self.lies
        managed = Versioned() if self.versioned else Plain()
        shape = lies.get("shape", (len(self.memory),))
        strides = lies.get("strides")
        tensor = managed.tensor
        tensor.data = lies.get("data", ctypes.addressof(self.memory))
        tensor.device = Device(*lies.get("device", (CPU, 0)))
        tensor.ndim = lies.get("ndim", len(shape))
        tensor.dtype = Type(*lies.get("dtype", FLOAT32))
        sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        if not lies.get("no_shape"):
            tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
        steps = None
        if strides is not None:
            steps = (ctypes.c_int64 * max(len(strides), 1))(*strides)
            tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = lies.get("byte_offset", 0)

        def delete(pointer):
            assert pointer == ctypes.addressof(managed)
            self.deleted += 1

        deleter = Deleter(delete)
        if not lies.get("no_deleter"):
            managed.deleter = deleter
        if self.versioned:
            managed.major, managed.minor = lies.get("version", (1, 0))
            managed.flags = lies.get("flags", 0)
        self.exports.append((managed, sizes, steps, deleter))
        return _new(ctypes.addressof(managed), lies.get("name", NAMES[self.versioned]))
