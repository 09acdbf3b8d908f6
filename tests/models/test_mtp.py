"""Multi-token prediction against its definition. On any mesh: tests/distributed/test_expert_parallel.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_fp4.parallel.mesh import ParallelMesh
from models.hybrid import HybridModel
from models.pattern import forward_flops_per_token, linear_shapes, parameter_count
from models.positions import Documents
from tests.composing import composed
from tests.models.builders import build, local, relative_error, small_config, tokens_and_targets

TWO = small_config(pattern="M-/*-/*-", mtp_loss_scaling_factor=0.3)
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4 + [2] * 9, [0] * 20], dtype=torch.int32)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def losses_by_definition(
    model: HybridModel, tokens: Tensor, targets: Tensor, documents: Tensor, weights: dict[str, Tensor]
) -> list[list[Tensor]]:
    """The loss of every target that counts, by depth: token by token, but for the blocks, which are the model's."""
    config, spans = model.config, Documents(documents, None)
    h = model.final_norm(_blocks(model.blocks, F.embedding(tokens, weights["embedding.weight"]), spans))
    found = [h]
    for depth in range(1, len(config.mtp_patterns) + 1):
        part = model.mtp[(depth - 1) % len(model.mtp)]
        following = torch.zeros_like(tokens)
        following[:, : tokens.shape[1] - depth] = tokens[:, depth:]
        e = F.embedding(following, weights["embedding.weight"])
        pair = torch.cat((norm(e, local(part.enorm.weight)), norm(h, local(part.hnorm.weight))), -1)
        h = part.final_norm(_blocks(part.blocks, pair @ local(part.eh_proj.weight).t(), spans))
        found.append(h)
    losses: list[list[Tensor]] = []
    for depth, h in enumerate(found):
        logits = h @ weights["head.weight"].t()
        losses.append([])
        for row in range(len(tokens)):
            for t in range(tokens.shape[1] - depth):
                same = bool((documents[row, t : t + depth + 1] == documents[row, t]).all())
                if same and (targets[row, t : t + depth + 1] >= 0).all():
                    losses[-1].append(F.cross_entropy(logits[row, t], targets[row, t + depth]))
    return losses


def _blocks(blocks: Any, h: Tensor, documents: Any) -> Tensor:
    batch, length, _ = h.shape
    h = h.flatten(0, 1)
    for block in blocks:
        h = block(h, length, documents)
    return h.unflatten(0, (batch, length))


@pytest.mark.parametrize("repeated", [False, True])
def test_losses_and_gradients_are_those_of_the_definition(mesh: ParallelMesh, repeated: bool) -> None:
    """Also at the ends of sequences and documents, and after a target that does not count."""
    config = replace(TWO, mtp_use_repeated_layer=repeated)
    model, (tokens, targets) = build(config, mesh), tokens_and_targets(config)
    assert len(model.mtp) == (1 if repeated else 2)
    targets = targets.clone()
    targets[1, 5] = -1
    model.mtp_losses = torch.zeros(2, 2, dtype=torch.float64)
    num_targets = int((targets >= 0).sum())
    loss = model(tokens, targets, DOCUMENTS, num_documents=4, num_targets=num_targets)
    loss.backward()
    sums = model.mtp_losses
    found = {name: local(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    weights = {n: local(p) for n, p in model.named_parameters()}
    main, *further = losses_by_definition(model, tokens, targets, DOCUMENTS, weights)
    assert loss.item() == pytest.approx(torch.stack(main).mean().item(), rel=1e-5)  # further ones are in gradients only
    # Depth 1: of row 0 the last of each of 3 documents; of row 1 the last token and 2 around the target without weight.
    assert [len(losses) for losses in further] == [34, 29] and len(main) == num_targets == 39
    for (total, count), losses in zip(sums.tolist(), further, strict=True):
        assert count == len(losses) and total == pytest.approx(torch.stack(losses).sum().item(), rel=1e-5)
    whole_loss = sum((0.15 * torch.stack(losses).sum() for losses in further), torch.stack(main).sum()) / num_targets
    names = list(weights)
    expected = torch.autograd.grad(whole_loss, [dict(model.named_parameters())[name] for name in names])
    for name, gradient in zip(names, expected, strict=True):
        assert relative_error(found[name], local(gradient)) < 2e-5, name
    with torch.no_grad():  # an evaluation computes the main loss alone
        model.mtp[0].forward = None  # type: ignore[assignment]
        alone = model(tokens, targets, DOCUMENTS, num_documents=4, num_targets=num_targets)
        assert alone.item() == loss.item()


def test_gradients_of_head_and_embedding_are_summed_in_fp32(mesh: ParallelMesh) -> None:
    """Over depths and micro-batches. A sum in BF16, with which Nemotron 3 Ultra diverged, is another gradient."""
    model, (tokens, targets) = build(TWO, mesh, torch.bfloat16), tokens_and_targets(TWO, batch=8)
    parts: dict[str, list[Tensor]] = {"head": [], "embedding": []}  # what each use adds, by FP64 products

    def used_head(module: Any, inputs: Any, options: Any, loss: Tensor) -> None:
        x_td, wanted = inputs[0].detach(), uses["targets"]
        logits = x_td @ local(module.weight).detach().to(x_td.dtype).t()
        dlogits = logits.float().softmax(-1) - F.one_hot(wanted.clamp(min=0), logits.shape[1])
        dlogits[wanted < 0] = 0
        product = dlogits.to(torch.bfloat16).double().t() @ x_td.double() / 20
        loss.register_hook(lambda dloss: parts["head"].append(product * dloss.double()))
        uses["targets"] = F.pad(wanted[1:], (0, 1), value=-1)

    def used_embedding(module: Any, inputs: Any, x_td: Tensor) -> None:
        rows = torch.zeros(TWO.vocab_size, TWO.hidden_dim, dtype=torch.float64)
        index = inputs[0].flatten()
        x_td.register_hook(lambda dx_td: parts["embedding"].append(rows.index_add(0, index, dx_td.double())))

    uses: dict[str, Tensor] = {}
    model.head.register_forward_hook(used_head, with_kwargs=True)
    model.embedding.register_forward_hook(used_embedding)
    for row in range(8):
        uses["targets"] = targets[row]
        model(tokens[row : row + 1], targets[row : row + 1]).backward()
    for name, found in parts.items():
        assert len(found) == 8 * 3
        gradient, expected = local(model.get_parameter(f"{name}.weight").grad), torch.stack(found).sum(0)
        in_bf16 = torch.zeros(expected.shape, dtype=torch.bfloat16)
        for part in found:
            in_bf16 += part.to(torch.bfloat16)
        assert relative_error(gradient, expected) < 1e-6
        assert relative_error(in_bf16, expected) > 2e-3


def test_nemotron_3_super_and_ultra_have_the_published_extra() -> None:
    """Parameters of `/*E/*E` with one set of weights; each depth computes them, and the head."""
    nano = replace(composed("model=nemotron_3_nano").model, moe_num_experts=512, moe_top_k=22, vocab_size=131072)
    for extra, hidden, heads, inner in ((2.942e9, 4096, 32, 2688), (11.216e9, 8192, 64, 5120)):
        sizes = {"moe_ffn_dim": inner, "moe_shared_ffn_dim": 2 * inner, "moe_latent_dim": hidden // 4}
        config = replace(nano, pattern="ME*E", hidden_dim=hidden, num_query_heads=heads, **sizes)
        with_mtp = replace(config, pattern="ME*E/*E/*E", mtp_use_repeated_layer=True)
        more = parameter_count(with_mtp).total - parameter_count(config).total
        assert more == pytest.approx(extra, abs=0.5e6)
        linears = [shape for shape in linear_shapes(with_mtp) if shape.name.startswith("mtp.")]
        assert all(shape.uses == 2 for shape in linears) and linears[0].parameters == 2 * hidden**2
        flops = [forward_flops_per_token(one, 8192) for one in (with_mtp, config)]
        mixing = 2 * 512 * hidden + 2 * 8192 * heads * 128  # the router; the causal half of two products
        by_hand = 2 * (sum(shape.flops_per_token // 2 for shape in linears) + mixing + 2 * hidden * 131072)
        assert flops[0] - flops[1] == by_hand
