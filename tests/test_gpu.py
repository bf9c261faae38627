"""On a GPU: the same numbers, the swap through pinned memory, and every script from end to end in bfloat16."""
import importlib

import pytest
import torch
from models import make
from test_logprobs import GROUPS

from refcache import Swap, completion_logprobs, load_model
from rloo import Args as RlooArgs
from rloo import rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", ["llama", "gemma3-window-6", "gpt2", "gemma2-softcaps"])
def test_log_probs_are_those_of_the_cpu(name):
    cpu, gpu = (completion_logprobs(make(name).to(device), GROUPS) for device in ("cpu", "cuda"))
    for a, b in zip(sum(cpu, []), sum(gpu, [])):
        assert (a - b.cpu()).abs().max() < 1e-4


def test_a_swap_through_pinned_memory_restores_every_bit():
    policy, reference = make("llama-tied").cuda(), make("llama-tied", seed=1)
    swap, before = Swap(policy, reference), [p.clone() for p in policy.parameters()]
    assert swap.saved[0].is_pinned()
    with pytest.raises(KeyError), swap as model:
        assert all((p.cpu() == q).all() for p, q in zip(model.parameters(), reference.parameters()))
        raise KeyError
    assert all((p == q).all() for p, q in zip(policy.parameters(), before))


def test_frozen_weights_stored_in_bfloat16_change_no_bit(tmp_path):
    make("llama").bfloat16().save_pretrained(tmp_path)
    one, two = (load_model(str(tmp_path), "cuda", dtype) for dtype in ("float32", "bfloat16"))
    assert torch.cuda.is_available() and {p.dtype for p in two.parameters()} == {torch.float32, torch.bfloat16}
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        one, two = (sum(completion_logprobs(model, GROUPS), []) for model in (one, two))
    assert all(map(torch.equal, one, two))


def test_greedy_rollouts_are_those_of_one_row_at_a_time():
    policy, prompts = make("llama").cuda(), [(5, 6, 7), (9, 8), (4, 3, 2, 11, 12)]
    class Tokenizer: eos_token_id, pad_token_id = None, 0
    args = RlooArgs(temperature=0, max_new_tokens=8, dtype="float32")
    together = rollout(policy, Tokenizer, prompts, 3, 1, args).groups
    assert together == [rollout(policy, Tokenizer, [prompt], 3, 1, args).groups[0] for prompt in prompts]


@pytest.mark.parametrize("script, flags", [("dpo", {}), ("kto", {}), ("rloo", {}), ("dpo", dict(ref="swap")), ("dpo", dict(ref="live"))])
def test_every_script_learns_the_demo_in_bfloat16(script, flags, tmp_path):
    module = importlib.import_module(script)
    history = module.main(module.Args(out=str(tmp_path), dtype="bfloat16", **flags))
    assert history[0]["eval_score"] < 0.5 and history[-1]["eval_score"] > 0.9
