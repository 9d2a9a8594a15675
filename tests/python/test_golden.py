"""torch gives the bits of the golden vectors, and converts fp8 as their model does."""

import importlib.machinery
import importlib.util
import json
import math
import pathlib

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = [json.loads(line) for line in (ROOT / "crates/device/tests/golden/reduce.jsonl").open()]
PAIRS = sorted({(case["op"], case["dtype"]) for case in CASES})
SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def load(text, dtype):
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype)


def narrow(x, dtype):
    """torch's conversion, but for two things. On one its versions differ: an e4m3fn that is too large becomes the
    largest number in 2.15, as here, and NaN in 2.11. And e8m0fnu has no sign: torch drops it, here it makes a NaN."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-448, 448)
    if dtype == torch.float8_e8m0fnu:
        x = x.masked_fill(x < 0, math.nan)
    return x.to(dtype)


def reduce_floats(op, dtype, inputs, factor):
    """Widened, combined in order, rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = [x.to(wide) for x in inputs]
    if op == "PREMUL_SUM":
        values = [narrow(x * torch.tensor(factor, dtype=wide), dtype).to(wide) for x in values]
    combine = {"PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}.get(op, torch.add)
    acc = values[0]
    for x in values[1:]:
        acc = combine(acc, x)
    return narrow(acc / len(values) if op == "AVG" else acc, dtype)


def reduce_complex(inputs):
    """The product by its definition: torch's own may fuse or reorder."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = inputs[0].to(wide).unbind(-1)
    for x in inputs[1:]:
        c, d = x.to(wide).unbind(-1)
        a, b = a * c - b * d, a * d + b * c
    return torch.stack([a, b], -1).to(dtype)


def reduce_integers(op, inputs):
    combine = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op]
    acc = inputs[0].clone()
    for x in inputs[1:]:
        acc = combine(acc, x)
    return acc


def same(got, expected, op):
    """Bit by bit; any NaN is a NaN, and torch does not say which of two zeros is the smaller."""
    if not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    equal = got.view(integer) == expected.view(integer)
    wide_got, wide_expected = got.double(), expected.double()
    equal |= wide_got.isnan() & wide_expected.isnan()
    if op in ("MIN", "MAX"):
        equal |= (wide_got == 0) & (wide_expected == 0)
    return bool(equal.all())


@pytest.mark.parametrize(("op", "name"), PAIRS, ids=lambda x: x)
def test_torch_agrees(op, name):
    for case in CASES:
        if (case["op"], case["dtype"]) != (op, name):
            continue
        dtype = getattr(torch, PARTS.get(name, name))
        if name in SIGNED and op not in ("MIN", "MAX"):
            # torch hardly computes with these; the signed ones have the same sums, products and bits.
            dtype = SIGNED[name]
        inputs = [load(text, torch.uint8 if name == "bool" else dtype) for text in case["inputs"]]
        expected = load(case["output"], dtype)
        if name == "bool":
            got = reduce_integers({"SUM": "BOR", "PRODUCT": "BAND"}.get(op, op), [x != 0 for x in inputs])
        elif name in PARTS and op == "PRODUCT":
            got = reduce_complex([x.view(-1, 2) for x in inputs]).view(-1)
        elif dtype.is_floating_point:
            got = reduce_floats(op, dtype, inputs, case.get("factor"))
        else:
            try:
                got = reduce_integers(op, inputs)
            except (NotImplementedError, RuntimeError) as error:
                pytest.skip(f"this torch has no {op} of {name}: {str(error).splitlines()[0]}")
        assert same(got, expected, op), (len(inputs), got, expected)


SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
SMALL += ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", SMALL)
def test_torch_converts_as_the_model(name):
    model = next(dtype for dtype in golden().DTYPES if dtype.name == name)
    dtype = getattr(torch, name)
    codes = torch.arange(model.codes).to(torch.uint8 if model.size == 1 else torch.uint16)
    expected = torch.tensor([model.decode(code) for code in range(model.codes)])
    assert same(codes.view(dtype).float(), expected, "SUM")

    # Every number, every middle between two neighbours, and the f32 right below and above all of these.
    numbers = model.finite + [model.next, 2 * model.next]
    middles = [(low + high) / 2 for low, high in zip(numbers, numbers[1:])]
    points = torch.tensor(numbers + middles, dtype=torch.float64).float()
    points = torch.cat([points, torch.tensor([math.inf, math.nan, 1e-45, 1e38, 3e38])])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    points = torch.cat([points, points.nextafter(up), points.nextafter(down)])
    points = torch.cat([points, -points])
    encoded = narrow(points, dtype).view(torch.uint8 if model.size == 1 else torch.uint16).tolist()
    for x, code in zip(points.tolist(), encoded):
        if math.isnan(x):
            assert math.isnan(model.decode(code))
        else:
            expected = model.encode(x)
            assert code == expected or (math.isnan(model.decode(code)) and math.isnan(model.decode(expected))), x


def golden():
    """The script that wrote the vectors, as a module."""
    loader = importlib.machinery.SourceFileLoader("golden", str(ROOT / "scripts/golden"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("golden", loader))
    loader.exec_module(module)
    return module
