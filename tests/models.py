"""Tiny random models of many architectures: their names, and what is special about each of them here."""
from copy import deepcopy
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SMALL = dict(TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
GPT2 = dict(TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=256)
MOE = dict(SMALL, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
           first_k_dense_replace=1)
GEMMA = dict(SMALL, head_dim=8, query_pre_attn_scalar=8)

MODELS = {  # name -> (model type, config, whether its completions may share a prompt)
    "llama": ("llama", SMALL, True),
    "llama-tied": ("llama", dict(SMALL, tie_word_embeddings=True), True),
    "qwen2": ("qwen2", SMALL, True),
    "qwen3": ("qwen3", dict(SMALL, head_dim=8), True),
    "mistral": ("mistral", dict(SMALL, sliding_window=None), True),
    "mistral-window-5": ("mistral", dict(SMALL, sliding_window=5), True),
    "mistral-window-200": ("mistral", dict(SMALL, sliding_window=200), True),
    "gpt2": ("gpt2", GPT2, True),
    "gpt-neox": ("gpt_neox", dict(SMALL, num_key_value_heads=4), True),
    "phi-head-bias": ("phi", dict(SMALL, num_key_value_heads=4), True),
    "gemma2-softcaps": ("gemma2", dict(GEMMA, sliding_window=6), False),
    "gemma3-window-6": ("gemma3_text", dict(GEMMA, sliding_window=6), True),
    "gemma3-softcap": ("gemma3_text", dict(GEMMA, sliding_window=64, final_logit_softcapping=3.0), True),
    "cohere-logit-scale": ("cohere", dict(SMALL, logit_scale=0.25), True),
    "granite-logits-scaling": ("granite", dict(SMALL, logits_scaling=4.0), True),
    "glm4-moe-buffer": ("glm4_moe", MOE, True),  # its routing bias is a persistent buffer, no parameter
    "mamba": ("mamba", dict(TOKENS, hidden_size=32, num_hidden_layers=2, state_size=8), False),
    "bloom-alibi": ("bloom", dict(TOKENS, hidden_size=32, n_layer=2, n_head=4), False),
    "falcon": ("falcon", SMALL, False),
    "stablelm": ("stablelm", SMALL, False),  # takes the attention function, but does not pass all keywords to it
}


def make(name, seed=0, attention=None, **changes):
    """One of MODELS, in eval mode."""
    if changes:
        model_type, config, _ = MODELS[name]
        return build(model_type, config | changes, seed, attention)
    return deepcopy(original(name, seed, attention))  # ten times as fast as another one


@cache
def original(name, seed, attention):
    model_type, config, _ = MODELS[name]
    return build(model_type, config, seed, attention)


def build(model_type, config, seed=0, attention=None):
    """A model in eval mode, with random weights so large that every token matters."""
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
