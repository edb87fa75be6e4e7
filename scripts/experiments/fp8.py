"""Rates and errors of products in FP8 with factors of each kind, by cuBLASLt through PyTorch 2.11 or later.

    python3 scripts/experiments/fp8.py      one Hopper GPU; a quarter of a minute

A product is A [M, K] times B [N, K] transposed, over 16K tokens: forward of a layer's projections, the gradient of the
input, and that of the weight. Some channels of inputs are 20 times as large as others, and gradients of tokens are
lognormal. The error is that of 1,024 rows against float64, relative, in the root mean square.
"""
import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES, LARGEST, LEAST = {E4: "E4M3", E5: "E5M2"}, {E4: 448.0, E5: 57344.0}, 1e-30


def by(x, dims, dtype):
    """Returns x over its largest magnitude along dims, in dtype, and the factors."""
    factor = x.abs().amax(dims, keepdim=True).clamp(min=LEAST) / LARGEST[dtype]
    return (x / factor).to(dtype), factor


def rows(x, dtype):
    return by(x.float(), 1, dtype)


def pieces(x, dtype):
    y, factor = by(x.float().view(x.shape[0], -1, 128), 2, dtype)
    return y.view(x.shape), factor[:, :, 0]


def blocks(x, dtype):
    m, k = x.shape
    y, factor = by(x.float().view(m // 128, 128, k // 128, 128), (1, 3), dtype)
    return y.view(m, k), factor[:, 0, :, 0]


def milliseconds(f, n=20):
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    for i in range(n + 3):
        if i == 3:
            begin.record()
        f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n


def measure(name, m, n, k, kind):
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    token = torch.exp(torch.randn(max(m, k), device="cuda") * 1.5).to(torch.bfloat16) * 1e-4
    channel = torch.ones(max(m, n, k), device="cuda", dtype=torch.bfloat16)
    channel[::97] = 20
    if kind == "forward":
        a, b = a * channel[:k], b * 0.02
    elif kind == "input":
        a, b = a * token[:m, None], b * 0.02
    else:
        a, b = a * token[:k], b * channel[:n, None]
    want = a[:1024].double() @ b.double().t()

    def show(what, f):
        error = (f()[:1024].double() - want).norm() / want.norm()
        rate = 2e-9 * m * n * k / milliseconds(f)
        print(f"{name:18} {m}x{n}x{k} {what:32} {rate:6.0f} TFLOP/s, error {100 * error:.2f} %", flush=True)

    show("bfloat16", lambda: a @ b.t())
    for dtype in [E4] if kind == "forward" else [E4, E5]:
        (qa, fa), (qb, fb) = rows(a, dtype), rows(b, E4)
        fb = fb.t().contiguous()
        for fast in True, False:
            show(f"{NAMES[dtype]}, rows{', fast' * fast}", lambda: torch._scaled_mm(
                qa, qb.t(), fa, fb, out_dtype=torch.bfloat16, use_fast_accum=fast))
        (ta, ga), (tb, gb) = by(a.float(), (0, 1), dtype), by(b.float(), (0, 1), E4)
        show(f"{NAMES[dtype]}, tensor, fast", lambda: torch._scaled_mm(
            ta, tb.t(), ga, gb, out_dtype=torch.bfloat16, use_fast_accum=True))
        if dtype == E4:
            (pa, ha), (pb, hb) = pieces(a, E4), blocks(b, E4)
            ha = ha.t().contiguous().t()
            show("E4M3, 1x128 and 128x128", lambda: scaled_mm(
                pa, pb.t(), [ha], [ScalingType.BlockWise1x128], [hb.t()], [ScalingType.BlockWise128x128],
                swizzle_a=SwizzleType.NO_SWIZZLE, swizzle_b=SwizzleType.NO_SWIZZLE, output_dtype=torch.bfloat16))


torch.manual_seed(0)
for model, hidden, width in ("3B", 3072, 8192), ("8B", 4096, 14336):
    tokens = 16384
    measure(model + " up", tokens, width, hidden, "forward")
    measure(model + " down", tokens, hidden, width, "forward")
    measure(model + " key", tokens, 1024, hidden, "forward")
    measure(model + " up, input", tokens, hidden, width, "input")
    measure(model + " up, weight", width, hidden, tokens, "weight")
