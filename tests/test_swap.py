"""Swap, unsharded and check_agreement: exchanged weights, and whether policy and reference agree."""
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from models import bad_input, equal, make, parametrize
from torch.distributed.tensor import DTensor

from logprobs import apply_fsdp
from refcache import Swap, check_agreement
from rloo import unsharded

IDS = torch.arange(5, 13)[None]


def assert_swap_is_exact(policy):
    """Also if the block raises. Only what trains is swapped."""
    policy.get_output_embeddings().requires_grad_(False)
    start = deepcopy(policy.state_dict())
    swap = Swap(policy)
    assert len(swap.weights) == sum(weight.requires_grad for weight in policy.parameters())

    for weight in policy.parameters():
        if weight.requires_grad:
            weight.data.add_(1)
    trained = deepcopy(policy.state_dict())
    with pytest.raises(KeyError), swap as model:
        assert model is policy and equal(model.state_dict(), start)
        raise KeyError
    assert equal(policy.state_dict(), trained)


@parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_swap_is_bitwise_equal_in_and_out(name):
    assert_swap_is_exact(make(name))


def test_unsharded_model_has_no_hooks_and_the_same_logits():
    """FSDP's hooks take long, and have nothing to do. Afterwards they are back."""
    policy = make("llama")
    apply_fsdp(policy, "cpu", "bfloat16")

    def hooks():
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in policy.modules())
    logits = policy(IDS).logits
    with unsharded(policy), torch.no_grad():
        assert hooks() == 0 and policy(IDS).logits.equal(logits)
    assert hooks() == 6 and policy(IDS).logits.equal(logits)
    assert all(isinstance(p, DTensor) for p in policy.parameters())


@parametrize("dtype, difference, agrees", [
    ("float32", 0.99e-4, True), ("float32", 1.01e-4, False), ("float32", float("nan"), False),
    ("bfloat16", 0.0299, True), ("bfloat16", 0.0301, False)])
def test_check_agreement_refuses_another_reference(dtype, difference, agrees):
    with nullcontext() if agrees else bad_input("differ by"):
        check_agreement(difference, dtype)
