"""The generated text of wgmma: every operand is named, once, at the place that the instruction wants."""

import re
from itertools import product

import pytest

from cuflash import instructions
from cuflash.schedules import wgmma
from tests import nvrtc

SIZES = (8, 16, 96, 128, 256)
STATEMENT = re.compile(r'asm volatile\((?P<text>(?:"[^"]*"\s*)+):(?P<outputs>[^:]*):(?P<inputs>[^;]*)\);')


def statements(columns: int, dtype: str = "bfloat16") -> list[re.Match]:
    found = list(STATEMENT.finditer(instructions.wgmma((columns,), dtype)))
    assert len(found) == 2, "A in shared memory, A in registers"
    return found


def places(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"%(\d+)", text)]


@pytest.mark.parametrize("columns", SIZES)
def test_every_operand_is_named(columns):
    """N / 2 accumulators; then A (a descriptor, or 4 registers), descriptor B, the predicate, and the directions."""
    for statement, own in zip(statements(columns), (1 + 1 + 1 + 2, 4 + 1 + 1 + 1), strict=True):
        outputs = re.findall(r'"\+f"\(c\[(\d+)\]\)', statement["outputs"])
        assert [int(i) for i in outputs] == list(range(columns // 2))
        assert len(re.findall(r'"[rln]"\(', statement["inputs"])) == own
        assert sorted(set(places(statement["text"]))) == list(range(columns // 2 + own))
        instruction = statement["text"].partition("wgmma.mma_async")[2]
        accumulators, rest = re.match(r"[^{]*\{([^}]*)\}(.*)", instruction, re.DOTALL).groups()
        assert places(accumulators) == list(range(columns // 2))
        predicate = columns // 2 + own - (3 if own == 5 else 2)
        assert places(rest) == [n for n in range(columns // 2, columns // 2 + own) if n != predicate]
        assert f"setp.ne.b32 p, %{predicate}, 0;" in statement["text"]


@pytest.mark.parametrize(("dtype", "name"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_opcode(dtype, name):
    for columns in SIZES:
        for statement in statements(columns, dtype):
            assert f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} " in statement["text"]


def test_each_width_once():
    text = instructions.wgmma((64, 128, 64), "float16")
    assert re.findall(r"struct Wgmma<(\d+)>", text) == ["64", "128"]


HEAD = """
typedef unsigned int u32;
typedef unsigned long long u64;
#define __forceinline__ inline
"""


@nvrtc.needed
@pytest.mark.parametrize(("dtype", "columns"), list(product(("float16", "bfloat16"), (16, 256))))
def test_the_assembler_takes_it(dtype, columns):
    calls = "\n".join(
        f"  Wgmma<{columns}>::multiply<{', '.join(map(str, down))}>(c, {'d' if len(down) == 2 else 'r'}, d, 1);"
        for down in ((0, 0), (0, 1), (1, 0), (1, 1), (0,), (1,))
    )
    kernel = f"""extern "C" __global__ void __launch_bounds__(128) f(float* x, u64 d) {{
  float c[{columns // 2}] = {{}};
  u32 r[4] = {{1, 2, 3, 4}};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
{calls}
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < {columns // 2}; ++i) x[i * 128 + threadIdx.x] = c[i];
}}"""
    text = HEAD + instructions.wgmma((columns,), dtype) + kernel
    assert nvrtc.compile_source(text, 90, target="a").registers
    with pytest.raises(nvrtc.CompilationError):
        nvrtc.compile_source(text.replace("p, 1, 1", "p, 1", 1), 90, target="a")


def test_schedules_multiply_by_whole_steps():
    """A width of wgmma is a multiple of 8 up to 256."""
    for head_dim in range(8, wgmma.MAX_HEAD_DIM + 1, 8):
        assert 0 < wgmma.padded(head_dim, wgmma.STEP) <= 256
