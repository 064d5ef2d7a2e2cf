"""Stream several texts at once with the bundled pair: ``python examples/stream.py``."""

import specdec_fast as sd
from specdec_fast.assets import demo_pair

prompts = ["One day, a little bird", "Count from 3 to 9: 3,", "Items: owl, hen, fox.\nSorted:"]
engine = sd.Engine(str(demo_pair() / "target"), str(demo_pair() / "draft"), max_batch_size=4, dtype="float32")
texts = list(prompts)
for chunk in engine.stream(prompts, sd.SamplingParams(max_new_tokens=40)):
    texts[chunk.index] += chunk.text
    print(f"[{chunk.index}] +{len(chunk.token_ids)} tokens: {chunk.text!r}")
print("\n---\n".join(["", *texts]))
