import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client.parser import text_string_to_metric_families

import language_toys as toys
from servax.protocols.dataplane import DataPlane
from servax.server.metrics import Metrics


def test_language_models_under_servaxs_names_and_vllms():
    with toys.llama().servable() as servable:
        plane = DataPlane([servable])
        metrics = Metrics(plane)
        prompt = toys.prompt(1, 40)
        for _ in range(2):
            servable.generate(prompt, temperature=0, max_tokens=10, ignore_eos=True)
        families = text_string_to_metric_families(metrics.text().decode())
        samples = {(each.name, *sorted(each.labels.values())): each.value for one in families for each in one.samples}
    own, theirs = ("1", "toy"), ("0", "toy")
    assert samples["servax_prompt_tokens_total", *own] == samples["vllm:prompt_tokens_total", *theirs] == 80
    assert samples["servax_prefix_hit_tokens_total", *own] == samples["vllm:prefix_cache_hits_total", *theirs] == 39
    assert samples["servax_answer_tokens_total", *own] == samples["vllm:generation_tokens_total", *theirs] == 20
    assert samples["servax_sequences_total", "1", "length", "toy"] == 2
    assert samples["vllm:request_success_total", "0", "length", "toy"] == 2
    for name in ("servax_time_to_first_token_seconds", "servax_generation_seconds", "servax_prefill_seconds"):
        assert samples[f"{name}_count", *own] == 2
    assert samples["vllm:time_to_first_token_seconds_count", *theirs] == 2
    assert samples["vllm:inter_token_latency_seconds_count", *theirs] <= 18
    assert samples["vllm:request_generation_tokens_sum", *theirs] == 20
    assert samples["servax_slots", *own] == 4
    assert samples["vllm:num_requests_running", *theirs] == samples["vllm:num_requests_waiting", *theirs] == 0
    assert 0 < samples["vllm:kv_cache_usage_perc", *theirs] < 1
    assert samples["servax_queued_requests", *own] == 0
