"""Tiny random models of many architectures, groups of tokens, and the log-probs of one forward per sequence."""
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from logprobs import BadInput, enable_shared_prompts

TOKENS = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SMALL = dict(TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
GEMMA = dict(SMALL, head_dim=8, query_pre_attn_scalar=8)

MODELS = {  # name -> model type, config
    "llama": ("llama", SMALL),
    "llama-tied": ("llama", dict(SMALL, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(SMALL, head_dim=8)),
    "mistral-window-5": ("mistral", dict(SMALL, sliding_window=5)),
    "mistral-window-200": ("mistral", dict(SMALL, sliding_window=200)),
    "gpt2": ("gpt2", dict(TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    "bert-layers-before-the-head": ("bert", dict(SMALL, is_decoder=True)),
    "phi-head-bias": ("phi", dict(SMALL, num_key_value_heads=4)),
    "gemma2-softcaps": ("gemma2", dict(GEMMA, sliding_window=6)),
    "gemma3-window-6": ("gemma3_text", dict(GEMMA, sliding_window=6)),
    "gemma3-softcap": ("gemma3_text", dict(GEMMA, sliding_window=64, final_logit_softcapping=3.0)),
    "granite-logits-scaling": ("granite", dict(SMALL, logits_scaling=4.0)),
    "glm4-moe-buffer": ("glm4_moe", dict(  # its routing bias is a persistent buffer, no parameter
        SMALL, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1)),
    "mamba": ("mamba", dict(TOKENS, hidden_size=32, num_hidden_layers=2, state_size=8)),
    "bloom-alibi": ("bloom", dict(TOKENS, hidden_size=32, n_layer=2, n_head=4)),
    "stablelm": ("stablelm", SMALL),  # does not pass all keywords to the attention function
}
PADDED = {"gemma2-softcaps", "mamba", "bloom-alibi", "stablelm"}  # all others share prompts

ROUNDING = {  # families with float32 inputs of layers, or with weights that stay float32
    "olmo2": ("olmo2", SMALL),
    "ernie-moe-float32-router": ("ernie4_5_moe", dict(
        SMALL, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=1,
        moe_layer_start_index=0)),
}

ON_CUDA = ["llama", "qwen3", "gpt2", "mistral-window-5", "mistral-window-200", "gemma3-window-6",
           "granite-logits-scaling"]
P, Q, R = (5, 17, 90, 3, 41, 8, 66), (9, 9, 31), (77,)
GROUPS = [(P, [(12, 4, 55, 2), (60, 2), (12, 33, 71, 80, 6, 19, 2)]), (Q, [(44, 2)]), (R, [(1,), (96, 95, 94, 2)]),
          (P + Q + P, [(13, 14, 15, 16, 2), (13, 14, 2)])]
EIGHT = [(12, 4, 55), (60,), (12, 33, 71, 80, 6, 19), (44, 2), (12, 4), (7, 7, 7, 7), (1, 2), (90,)]
SAMPLES = {k: [(P, EIGHT[:k]), (P + Q + P, EIGHT[-k:]), (R, EIGHT[:k])] for k in (1, 2, 8)}  # k completions per prompt


cases = pytest.mark.parametrize


def bad_input(words):
    return pytest.raises(BadInput, match=words)


def slow_but(quick, names):
    """Cases of a test. Those that are not quick are slow."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def make(name, seed=0, attention=None, **changes):
    model_type, config = MODELS[name]
    return build(model_type, config | changes, seed, attention)


def ready(name):
    model = make(name)
    enable_shared_prompts(model)
    return model


def build(model_type, config, seed=0, attention=None):
    """Random weights, so large that every token matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(2 if model_type == "mamba" else 4)  # more, and a recurrence amplifies rounding
            elif key.endswith("bias"):
                p.normal_(std=0.3)  # head biases start at zero, which would hide them
    return model.eval()


def logps(model, rows, temperature=1.0):
    """The definition, of rows (prompt, y): one forward, and the log-softmax of all logits. (len(y),) each."""
    ids = pad_sequence([torch.tensor(prompt + y) for prompt, y in rows], batch_first=True)  # changes nothing before it
    logits = model(input_ids=ids.to(model.device)).logits.float() / temperature
    found = []
    for row, (prompt, y) in zip(logits, rows):
        found.append(F.log_softmax(row[len(prompt) - 1:][:len(y)], -1)[range(len(y)), y])
    return found


def slow(model, groups, temperature=1.0):
    return [[logps(model, [(prompt, y)], temperature)[0] for y in completions] for prompt, completions in groups]


def flat(ragged):
    return torch.cat([logps for group in ragged for logps in group])


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def values_and_gradients(function, model, groups, **options):
    model.zero_grad()
    logps = flat(function(model, groups, **options))
    (logps * torch.linspace(-1, 1, len(logps), device=logps.device)).sum().backward()  # every token has another weight
    return logps.detach(), gradient(model)


def equal(one, two):
    return set(one) == set(two) and all(one[name].equal(two[name]) for name in one)
