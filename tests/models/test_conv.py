import torch
import torch.nn.functional as F

from models.conv import causal_conv_silu


def inputs(length=9, channels=6, width=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, length, channels), (channels, width), (channels,))
    return [torch.randn(*s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def reference(x, weight, bias):
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[2])).transpose(1, 2)


def test_equals_conv1d_in_value_and_gradients():
    for length, width in ((9, 4), (2, 4), (5, 1)):
        tensors = inputs(length=length, width=width)
        y, expected = causal_conv_silu(*tensors), reference(*tensors)
        torch.testing.assert_close(y, expected)
        actual_gradients = torch.autograd.grad(y.sin().sum(), tensors)
        for a, e in zip(actual_gradients, torch.autograd.grad(expected.sin().sum(), tensors), strict=True):
            torch.testing.assert_close(a, e)


def test_gradcheck():
    assert torch.autograd.gradcheck(causal_conv_silu, inputs(length=5, channels=2))


def test_is_causal():
    x, weight, bias = (t.detach() for t in inputs())
    y = causal_conv_silu(x, weight, bias)
    changed = x.clone()
    changed[:, 5:] += 1
    y_changed = causal_conv_silu(changed, weight, bias)
    assert torch.equal(y[:, :5], y_changed[:, :5])
    assert (y[:, 5] != y_changed[:, 5]).all()


def test_bf16_input_is_computed_in_fp32():
    x, weight, bias = (t.detach().float() for t in inputs())
    x = x.bfloat16().requires_grad_()
    y = causal_conv_silu(x, weight, bias)
    assert y.dtype == torch.float32
    assert torch.equal(y, causal_conv_silu(x.detach().float(), weight, bias))
    assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.bfloat16
