"""Tokenizers with and without BOS, and chat templates for them."""

from __future__ import annotations

from tokenizers import processors
from transformers import AutoTokenizer

from specdec_fast.assets import demo_pair

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'error' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{% if think is defined %}({{ think }}){% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# A client's ``n`` makes it endless: n**3 turns; the sandbox of transformers lets one range have 100,000.
LOOP = "{% for i in range(n or 0) %}{% for j in range(n) %}{% for k in range(n) %}{% endfor %}{% endfor %}{% endfor %}"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count from one to five"}]


def chat_tokenizer(chat_template=TEMPLATE, adds_bos=True):
    """The tokenizer of the bundled pair, which adds BOS (``<s>``, id 0) to a text as Llama's does."""
    tokenizer = AutoTokenizer.from_pretrained(demo_pair() / "target")
    tokenizer.chat_template = chat_template
    if not adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer
