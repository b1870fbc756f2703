"""Stacks that tests run on.

These are not in `conftest.py`: pytest imports that module under another name, so that its `Spec`
would differ from the one that tests import, and stacks would start twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.routing.instances import Role

VISION, AUDIO = "tiny-qwen2.5-vl", "tiny-qwen2-audio"
E_PD, E_P_D = "1e1pd", "1e1p1d"
DISK, REDIS, CLUSTER, MEMORY = "file", "redis", "cluster", "shm"

AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
"""Whether the CPU has AMX: an engine in bfloat16 then crashes on a short first prompt.

See docs/decisions/index.md.
"""


@dataclass(frozen=True)
class Spec:
    """Properties of a stack.

    Attributes:
        model: its model.
        topology: its engines.
        store: where its encoder store is.
        bf16: whether engines compute in bfloat16 instead of float32.
        ranks: number of processes that share the encode engine's tensors.
        consumer_ranks: the same for each of the other engines.
        traced: whether engines and proxy export spans, and engines report details of usage, as
            servers that encode do.
        conversing: whether prefill reads decode's blocks of a conversation, and has no prefix
            cache.
        saving: whether consumers write what they encode to the store, and the policy `cost` leaves
            small pictures to them.
        follows: whether the proxy follows the engines' KV events. Their caches are small.
        adapted: whether consumers serve an adapter of the language model, and all engines have a
            chat template that refuses messages without text.
    """

    model: str
    topology: str
    store: str
    bf16: bool = False
    ranks: int = 1
    consumer_ranks: int = 1
    traced: bool = False
    conversing: bool = False
    saving: bool = False
    follows: bool = False
    adapted: bool = False

    def __str__(self) -> str:
        traits = ["bf16"] * self.bf16 + [f"tp{self.ranks}"] * (self.ranks > 1)
        traits += [f"consumer-tp{self.consumer_ranks}"] * (self.consumer_ranks > 1)
        traits += ["traced"] * self.traced + ["conversing"] * self.conversing
        traits += ["saving"] * self.saving
        traits += ["follows"] * self.follows
        traits += ["adapted"] * self.adapted
        return "-".join([self.model, self.topology, self.store, *traits])

    def flags(self) -> Mapping[Role, Sequence[str]]:
        """Return the engines' flags, in addition to those of every stack."""
        every = ["--trust-request-mm-kwargs", *(["--dtype", "bfloat16"] if self.bf16 else [])]
        details = self.traced or self.topology.endswith("epd")
        every += ["--enable-prompt-tokens-details"] * details
        if self.topology.endswith("epd"):
            every += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        own = {Role.PREFILL: ["--no-enable-prefix-caching"] * self.conversing}
        if self.follows:
            every += ["--block-size", "32", "--num-gpu-blocks-override", str(FEW_BLOCKS)]
        return {role: [*every, *self._ranks_of(role), *own.get(role, [])] for role in Role}

    def _ranks_of(self, role: Role) -> Sequence[str]:
        ranks = self.ranks if role is Role.ENCODE else self.consumer_ranks
        several = ["--tensor-parallel-size", str(ranks), "--distributed-executor-backend", "mp"]
        return several if ranks > 1 else []

    def proxy_flags(self) -> Sequence[str]:
        """Return the proxy's flags, in addition to those of every stack."""
        return ["--encode-below-pixels", str(SMALL_PIXELS)] if self.saving else []

    def kv_extra(self) -> Mapping[str, Any]:
        """Return the additional settings of prefill's and decode's connector."""
        if not self.conversing:
            return {}
        return {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": BLOCKS_TTL_S}


SMALL_PIXELS = 20_000
"""Size below which a picture is left to its consumer, on the stacks that save it."""

FEW_BLOCKS = 160
"""Blocks of an engine that soon evicts: some more than one prompt may have."""

BLOCKS_TTL_S = 60
"""Longer than any test's conversation, short enough for decode's memory."""

ON_DISK = Spec(VISION, E_PD, DISK)
ON_REDIS = Spec(VISION, E_PD, REDIS, bf16=not AMX)
ON_CLUSTER = Spec(VISION, E_P_D, CLUSTER, ranks=2)
IN_MEMORY = [Spec(VISION, topology, MEMORY) for topology in (E_PD, E_P_D)]
ON_AUDIO = Spec(AUDIO, E_PD, DISK)
TRACED = Spec(AUDIO, E_P_D, DISK, traced=True)
CONVERSING = Spec(VISION, E_P_D, DISK, conversing=True)
SHARDED = Spec(VISION, E_PD, DISK, consumer_ranks=2)
SHARDED_IN_MEMORY = Spec(VISION, E_PD, MEMORY, consumer_ranks=2)
SAVING = [Spec(VISION, topology, DISK, saving=True) for topology in (E_PD, E_P_D)]
FOLLOWS = Spec(VISION, "2pd", DISK, follows=True)
ADAPTED = Spec(VISION, E_PD, DISK, adapted=True)
SERVERS = Spec(VISION, "2epd", MEMORY)
SERVERS_AUDIO = Spec(AUDIO, "1epd", MEMORY)
MIXED = Spec(VISION, "1e2epd", REDIS)
OTHERS = (
    "tiny-internvl",
    "tiny-paddleocr-vl",
    "tiny-paligemma",
    "tiny-pixtral",
    "tiny-qwen2.5-omni",
    "tiny-qwen3-omni",
    "tiny-qwen3-vl",
)
"""Models that only their own tests use, with one stack each. `scripts/model_matrix.sh` has all."""
MODELS = (VISION, AUDIO, *OTHERS)
MODEL_STACKS = [Spec(model, E_PD, DISK) for model in OTHERS]
OMNI_STACKS = [spec for spec in MODEL_STACKS if "omni" in spec.model]
VIDEO_STACKS = [spec for spec in MODEL_STACKS if spec.model.endswith(("omni", "internvl", "3-vl"))]
TIMED_STACKS = [spec for spec in MODEL_STACKS if spec.model.endswith("3-vl")]
STACKS = [
    ON_DISK,
    ON_REDIS,
    ON_CLUSTER,
    *IN_MEMORY,
    ON_AUDIO,
    TRACED,
    CONVERSING,
    SHARDED,
    SHARDED_IN_MEMORY,
    *SAVING,
    FOLLOWS,
    ADAPTED,
    SERVERS,
    SERVERS_AUDIO,
    MIXED,
    *MODEL_STACKS,
]

EACH_STORE = [ON_DISK, ON_REDIS, ON_CLUSTER, IN_MEMORY[0]]

OF_MODULES: Mapping[str, Sequence[Spec]] = {
    "test_conversations": [CONVERSING],
    "test_adapters": [ADAPTED],
    "test_content_balance": [FOLLOWS],
    "test_cost_policy": SAVING[:1],
    "test_kills": [CONVERSING],
    "test_kv_events": [FOLLOWS],
    "test_memory_server": IN_MEMORY,
    "test_models": MODEL_STACKS,
    "test_prefill_decode": [CONVERSING],
    "test_ranks": [SHARDED],
    "test_servers": [SERVERS],
    "test_store_alone": [SERVERS],
    "test_traces": [TRACED],
}
"""Stacks that the tests of a module run on; `ON_DISK` if it is not listed."""

OF_TESTS: Mapping[str, Sequence[Spec]] = {
    # Answers: each model, store and topology, once.
    "test_one_picture": [*EACH_STORE, SERVERS],
    "test_different_pictures_give_different_answers": [*EACH_STORE, SERVERS],
    "test_a_sound": [ON_AUDIO, TRACED, SERVERS_AUDIO],
    "test_a_sound_is_encoded_once_for_all_formats_that_clients_guess": [ON_AUDIO],
    "test_two_sounds_one_by_url": [ON_AUDIO],
    "test_different_sounds_give_different_answers": [ON_AUDIO, TRACED],
    "test_four_pictures": [ON_DISK, SERVERS],
    "test_a_picture_twice": [ON_DISK, SERVERS],
    "test_a_picture_from_a_file": [ON_DISK, SERVERS],
    "test_a_video": [ON_DISK, SERVERS],
    "test_a_picture_and_a_video": [ON_DISK, SERVERS],
    "test_text_only": [ON_DISK, ON_CLUSTER],
    # Where items are encoded and stored: each store, and a model without pictures.
    "test_media_are_preprocessed_only_by_the_encode_engine": [*EACH_STORE, ON_AUDIO],
    "test_encoder_output_is_stored_under_its_content_key": [*EACH_STORE, ON_AUDIO],
    "test_prefill_fetches_from_the_store": [*EACH_STORE, ON_AUDIO],
    "test_an_item_seen_before_is_neither_encoded_nor_preprocessed_again": [*EACH_STORE, ON_AUDIO],
    "test_answers_of_hits_equal_those_of_the_engine_without_proxy": [
        *EACH_STORE,
        ON_AUDIO,
        SERVERS,
        SERVERS_AUDIO,
    ],
    # Changes of the store during requests.
    "test_entries_deleted_between_lookup_and_load_fail_no_request": EACH_STORE,
    "test_an_entry_is_deleted_while_its_request_waits_for_another": EACH_STORE,
    "test_media_are_encoded_again_after_their_entry_was_deleted": EACH_STORE,
    "test_an_entry_that_was_deleted_after_it_was_encoded": [ON_DISK, ON_REDIS],
    "test_a_promised_entry_that_never_arrives_fails_only_its_request": [ON_DISK, ON_REDIS],
    "test_engine_metrics_count_stored_and_loaded_entries": [ON_DISK, ON_REDIS],
    "test_the_store_stops_while_requests_run": [ON_REDIS],
    "test_redis_is_paused_while_serving": [ON_REDIS],
    "test_requests_survive_a_stop_and_a_restart_of_redis": [ON_REDIS],
    # In bfloat16, requests that are batched with others get other tokens.
    "test_entries_come_and_go_while_requests_want_them": [ON_DISK, ON_CLUSTER],
    "test_requests_survive_a_stop_and_a_restart_of_a_redis_cluster": [ON_CLUSTER],
    "test_one_rank_of_the_encode_engine_writes": [ON_CLUSTER],
    "test_every_answer_is_right_while_the_memorys_server_ends_and_hangs": [
        *IN_MEMORY,
        SHARDED_IN_MEMORY,
    ],
    "test_memory_of_killed_engines_is_free_and_the_others_answer": IN_MEMORY[:1],
    "test_memory_of_a_killed_rank_is_free_and_its_engine_answers_again": [SHARDED_IN_MEMORY],
    "test_all_ranks_of_a_consumer_read_the_memory_of_their_host": [SHARDED_IN_MEMORY],
    # Differences with a separate prefill engine.
    "test_small_picture_is_encoded_by_its_consumer_and_found_by_the_next_request": SAVING,
    "test_a_client_that_leaves_stops_the_engine": [ON_DISK, ON_CLUSTER, SERVERS],
    "test_a_response_about_a_picture_is_the_engines_own": [ON_DISK, ON_CLUSTER, SERVERS],
    "test_a_message_about_a_picture_is_the_engines_own": [ON_DISK, ON_CLUSTER, SERVERS],
    "test_a_completion_is_the_engines_own": [ON_DISK, ON_CLUSTER],
    "test_completions_responses_and_messages_are_prefilled_first": [ON_CLUSTER],
    "test_request_that_every_engine_answers_500_ejects_none": [FOLLOWS],
    "test_usage_of_the_prefix_cache_is_that_of_one_engine": [TRACED],
    "test_the_doctor_finds_nothing_to_mend_in_a_real_fleet": [*EACH_STORE, TRACED, SERVERS],
    "test_the_doctor_makes_prefill_read_blocks_of_decode": [CONVERSING],
    "test_entries_have_the_sizes_of_those_in_the_store": [SERVERS, SERVERS_AUDIO],
    "test_servers_encode_while_the_encode_instance_is_away": [MIXED],
    "test_workers_of_a_proxy_share_what_servers_write_to_redis": [MIXED],
    # Media that only some models accept.
    "test_a_sound_heard_before_is_a_hit": OMNI_STACKS,
    "test_a_picture_and_a_video_in_one_request": VIDEO_STACKS,
    "test_a_video_with_timestamps_is_sent_as_metadata": TIMED_STACKS,
}
"""Stacks of a test, if they differ from those of its module.

A stack takes half a minute to start, and a test some seconds on each. Tests run on several stacks
if a store, a model or a topology makes a difference; otherwise on one.
"""


def stacks_of(module: str, test: str) -> Sequence[Spec]:
    """Return the stacks that a test runs on."""
    return OF_TESTS.get(test) or OF_MODULES.get(module, [ON_DISK])
