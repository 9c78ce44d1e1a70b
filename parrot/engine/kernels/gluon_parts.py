"""Parts of the kernels in Gluon: instructions without operands, and a barrier."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # The second name is Triton 3.6's.

# Programmatic dependent launch: see `launch.early_launch`.
WAIT_FOR_PREVIOUS = gl.constexpr("griddepcontrol.wait; mov.u32 $0, 0;")
LET_NEXT_START = gl.constexpr("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def run(ASSEMBLY: gl.constexpr):
    """An instruction without operands."""
    arguments = [gl.to_tensor(0)]
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", arguments, dtype=gl.int32, is_pure=False, pack=1)
