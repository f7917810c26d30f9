"""Text of instructions whose operand lists are too long to write by hand: inline PTX wants every operand named.

``wgmma.mma_async`` of Hopper multiplies 64 rows by N columns; a thread holds N / 2 accumulators, each an operand.  Source:
PTX ISA, "wgmma.mma_async".
"""

from __future__ import annotations

#: by dtype; float32 comes as planes of float16
_PTX_TYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float32": "f16"}
#: types whose operands in shared memory can only have the contraction along their rows
_ONE_WAY = ("e4m3",)


def wgmma(columns: tuple[int, ...], dtype: str) -> str:
    """C++ text: ``Wgmma<N>`` for each N, with A in shared memory or in registers, operands either way round."""
    head = (
        "// wgmma.mma_async m64nN: c (+)= A B.  kDownA, kDownB: 1 where the contraction runs down the columns of the\n"
        "// operand in shared memory, which 8-bit types do not have.\n"
        "template <int kColumns> struct Wgmma;\n"
    )
    return head + "".join(_struct(n, _PTX_TYPES[dtype]) for n in sorted(set(columns)))


def _struct(columns: int, ptx_type: str) -> str:
    size = columns // 2
    shared = _product(columns, ptx_type, f"%{size}", size + 1, "%{}, %{}", ("kDownA", "kDownB"), '"l"(a)')
    places = ", ".join(f"%{size + i}" for i in range(4))
    given = ", ".join(f'"r"(a[{i}])' for i in range(4))
    registers = _product(columns, ptx_type, f"{{{places}}}", size + 4, "%{}", ("kDownB",), given)
    method = "static __device__ __forceinline__ void multiply"
    return (
        f"template <> struct Wgmma<{columns}> {{\n"
        f"  template <int kDownA, int kDownB> {method}(float (&c)[{size}], u64 a, u64 b, int accumulate) {{\n{shared}  }}\n"
        f"  template <int kDownB>\n"
        f"  {method}(float (&c)[{size}], const u32 (&a)[4], u64 b, int accumulate) {{\n{registers}  }}\n"
        "};\n"
    )


def _product(
    columns: int, ptx_type: str, a: str, b: int, directions: str, constants: tuple[str, ...], given_a: str
) -> str:
    """One asm statement; `b` is the place of descriptor B, behind it lie the predicate and the constants."""
    size = columns // 2
    accumulators = ", ".join(f"%{i}" for i in range(size))
    outputs = ", ".join(f'"+f"(c[{i}])' for i in range(size))
    turns = ptx_type not in _ONE_WAY
    down = ", " + directions.format(*(b + 2 + i for i in range(len(constants)))) if turns else ""
    immediates = "".join(f', "n"({name})' for name in constants) if turns else ""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k{16 if turns else 32}.f32.{ptx_type}.{ptx_type}"
    return (
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b + 1}, 0;\\n"\n'
        f'                 "{opcode} {{{accumulators}}}, {a}, %{b}, p, 1, 1{down};\\n}}"\n'
        f'                 : {outputs}\n                 : {given_a}, "l"(b), "r"(accumulate){immediates});\n'
    )
