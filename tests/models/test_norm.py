import torch
import torch.nn.functional as F

from models.norm import GatedRMSNorm, RMSNorm, gated_rms_norm, rms_norm


def draws(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_rms_norm_formula():
    x, weight = draws((5, 8), (8,))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)


def test_the_gate_comes_before_the_norm_and_groups_are_normalized_apart():
    y, z, weight = draws((5, 12), (5, 12), (12,))
    gated = y * z * torch.sigmoid(z)
    parts = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.split(4, -1)]
    torch.testing.assert_close(gated_rms_norm(y, z, weight, 3, 1e-5), torch.cat(parts, -1) * weight)
    after = rms_norm(y, weight, 1e-5) * F.silu(z)
    assert not torch.allclose(gated_rms_norm(y, z, weight, 1, 1e-5), after, rtol=0.1)


def test_gradcheck():
    assert torch.autograd.gradcheck(lambda *t: rms_norm(*t, 1e-5), draws((3, 4), (4,)))
    assert torch.autograd.gradcheck(lambda *t: gated_rms_norm(*t, 2, 1e-5), draws((3, 4), (3, 4), (4,)))


def test_modules_compute_in_fp32_and_return_the_compute_dtype(mesh):
    norm, gated = RMSNorm(8, 1e-5, mesh), GatedRMSNorm(8, 1e-5, mesh)
    weight = torch.linspace(0.5, 2, 8)
    for module in (norm, gated):
        module.weight.data.to_local().copy_(weight)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(norm(x), rms_norm(x.float(), weight, 1e-5).bfloat16())
    y_bshp, z_bsgc = y[None].unflatten(-1, (4, 2)), x[None].unflatten(-1, (2, 4))
    assert torch.equal(gated(y_bshp, z_bsgc), gated_rms_norm(y, x.float(), weight, 2, 1e-5).bfloat16())
