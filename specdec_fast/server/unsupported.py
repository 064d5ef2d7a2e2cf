"""Fields of a request that are refused, because whoever ignores one answers another request.

With them OpenAI's API, vLLM, SGLang, TGI, llama.cpp and transformers constrain an answer, change its text, or ask for
something that the engine does not compute. A field that only qualifies another one (``mirostat_tau``) is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The values that change nothing; None is always one.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "adapter_id": (),
    "adaptive_target": (-1,),
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "custom_logit_processor": (),
    "do_sample": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "enable_thinking": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "generation_config": (),
    "grammar": ("",),  # llama.cpp's default
    "guidance_scale": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_json_object": (False,),
    "guided_regex": (),
    "guideline": (),
    "include_reasoning": (True,),
    "input_ids": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    "max_length": (),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "min_keep": (0, 1),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_predict": (),  # -1, no limit, would be another one than the server's
    "n_probs": (0,),
    "no_repeat_ngram_size": (0,),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "prompt_embeds": (),
    "reasoning": (),
    "reasoning_budget_tokens": (-1,),
    "reasoning_effort": (),
    "reasoning_format": ("auto", "deepseek"),
    "regex": (),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": (),
    "session_params": (),
    "smoothing_factor": (0,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ("", []),
    "structural_tag": (),
    "suffix": ("",),
    "t_max_predict_ms": (-1, 0),
    "tfs_z": (1,),
    "thinking": (),
    "thinking_token_budget": (-1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "truncate": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}

# The fields that say whether the model may call these functions. With "none" the functions change nothing, because they
# are not shown to the model.
_CHOICES = {"functions": "function_call"}

_ADVICE = {
    "best_of": "use n, and choose among its texts",
    "cache_salt": "all requests share one prefix cache, and serve --no-prefix-cache has none; leave it out",
    "chat_template": "the server's option --chat-template sets the template of all requests",
    "do_sample": "use temperature; 0 decodes greedily",
    "enable_thinking": "put it into chat_template_kwargs",
    "ebnf": "use structured_outputs, with grammar",
    "functions": 'use tools, or send function_call="none"',
    "grammar": "use structured_outputs, with grammar",
    "guided_choice": "use structured_outputs, with choice",
    "guided_grammar": "use structured_outputs, with grammar",
    "guided_json": "use structured_outputs, with json",
    "guided_json_object": "use structured_outputs, with json_object",
    "guided_regex": "use structured_outputs, with regex",
    "json_schema": "use response_format or structured_outputs",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "n_cmpl": "use n",
    "n_predict": "use max_tokens",
    "n_probs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "include_reasoning": "only chats have it",
    "reasoning_effort": "only chats have it",
    "reasoning": "use reasoning_effort, thinking_token_budget or include_reasoning",
    "reasoning_budget_tokens": "use thinking_token_budget",
    "reasoning_format": "the server's option --reasoning-parser sets it for all requests",
    "regex": "use structured_outputs, with regex",
    "repeat_penalty": "use repetition_penalty",
    "structural_tag": "use structured_outputs, with structural_tag",
    "thinking": "use chat_template_kwargs",
    "thinking_token_budget": "only chats have it",
}


def first_unsupported(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first of the fields that are not served that must be refused, with the reason; None without one."""
    for name, value in fields.items():
        changes_nothing = value is None or value in UNSUPPORTED.get(name, (value,))
        if not changes_nothing and fields.get(_CHOICES.get(name, "")) != "none":
            return name, f"this field is not supported; {_ADVICE.get(name, 'leave it out')}"
    return None
