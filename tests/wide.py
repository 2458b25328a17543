"""The tests of which `scripts/test` runs a random sample, or none, to end within minutes.

They extend other tests to more architectures, sizes and programs. Others are attacks that take a
while, and measurements that need an idle machine. `scripts/test-wide` runs all of them, except
those of tests/gpu, and all hypothesis tests, of which `scripts/test` tries a part of the examples.
`scripts/test-all` runs these, too, and pytest without `--sample` runs them like all others.
"""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Collection, Iterable

# Run by scripts/test-wide alone.
LONG = frozenset(
    {
        "gpu/standin/test_clock.py::test_copies_hide_behind_computation",
        "model/test_bench.py::test_bench_of_a_model_ten_times_the_devices_memory",
        "model/test_ctrl_c.py::test_no_ctrl_c_is_lost_across_a_run",
        "model/test_disk.py::test_a_decode_takes_as_long_as_the_latest_of_disk_link_and_cpu",
        "model/test_disk.py::test_reads_ahead_take_their_time_while_layers_are_computed",
        "model/test_disk_group.py::test_the_limit_of_a_control_group_is_never_reached",
        "model/test_disk_sessions.py::test_measured_costs_of_batches_hold_the_disks_price",
        "model/test_disk_sessions.py::test_streams_write_the_same_within_the_memory_they_may_take",
        "model/test_block.py::test_sampled_texts_have_the_targets_distribution",
        "model/test_eagle.py::test_sampled_texts_have_the_targets_distribution",
        "model/test_engine.py::test_opening_and_closing_a_hundred_times_leaks_nothing",
        "model/test_gpu_check.py::test_a_dry_run_on_sim_measures_everything_and_ends_with_json",
        "model/test_gpu_check.py::test_a_second_call_measures_the_draft_and_gpt_oss",
        "model/test_gpu_check.py::test_sigterm_removes_the_models_and_keeps_the_results",
        "model/test_gpu_check_pack.py::test_an_empty_environment_with_the_pack_runs_the_check",
        "model/test_gpu_check_pack.py::test_the_pack_fits_that_machines_python_and_what_may_be_carried",  # noqa: E501
        "model/test_hostile_files.py::test_measurements_that_cannot_be_kept_are_shown_with_the_reason",  # noqa: E501
        "model/test_hybrid_model.py::test_each_slower_cell_has_a_rule_and_a_plan_says_what_the_other_end_gives",  # noqa: E501
        "model/test_hybrid_model.py::test_readme_counts_where_default_plans_are_slower_than_llama_cpp",  # noqa: E501
        "model/test_hybrid_model.py::test_the_page_is_what_its_script_makes",
        "model/test_hybrid_model.py::test_the_tables_on_mtp_are_what_their_script_makes",
        "model/test_layout.py::test_layouts_of_all_published_shapes_fit",
        "model/test_long_draft_prompts.py::test_a_draft_model_reads_a_prompt_of_22_thousand_tokens",
        "model/test_our_worker.py::test_one_round_trip_and_two_hand_overs_of_activations",
        "model/test_plan_command.py::test_a_plan_for_splits_says_where_its_hits_come_from",
        "model/test_plan_command.py::test_what_host_memory_does_not_hold_is_said_with_what_would",
        "model/test_plan_shapes.py::test_more_memory_is_never_refused_and_never_declines_more_batches",  # noqa: E501
        "model/test_plan_shapes.py::test_more_memory_or_a_shorter_context_never_loses_time_nor_does_a_ubatch_of_the_user_win",  # noqa: E501
        "model/test_running_text.py::test_measured_sizes_copy_what_running_text_copies",
        "model/test_stages.py::test_the_links_of_two_devices_copy_at_the_same_time_for_a_small_batch",  # noqa: E501
        "model/test_stages.py::test_two_devices_read_a_prompt_almost_twice_as_fast",
        "server/test_llama_server_images.py::test_chats_are_answered_alike",
        "server/test_llama_server_images.py::test_llama_mtmd_cli_gives_the_answer_of_the_chat",
        "server/test_llama_server_images.py::test_raw_prompts_are_continued_alike",
        "server/test_llama_server_images.py::test_what_llama_server_refuses_is_refused",
        "model/test_wheel.py::test_bash_completes_commands_and_flags",
        "model/test_wheel.py::test_the_installed_program_decodes_with_the_embedded_pair",
        "model/test_wheel.py::test_the_wheel_has_the_player_and_is_for_any_python",
        "model/test_wheel.py::test_the_wheel_is_small_and_has_what_the_program_shows",
        "model/test_wheel.py::test_the_whole_wheel_needs_neither_a_compiler_nor_llama_cpp_python",
        "model/test_wheel.py::test_without_a_compiler_the_install_ends_with_the_remedy",
        "model/test_worker_operations.py::test_the_record_has_what_clients_send_and_nothing_else",
        "pure/chat/test_schema_suite.py::test_closed_objects_allow_nothing_that_the_schema_forbids",
        "pure/chat/test_schema_suite.py::test_the_page_has_the_outcomes",
        "pure/times/test_corrections.py::test_prices_stay_near_the_true_times_for_100_000_decodes",
        "pure/plan/test_chosen_plans.py::test_every_machine_card_and_context",
        "pure/speculation/test_replayed_drafters.py::test_all_drafters_together_are_near_the_best_of_them_alone",  # noqa: E501
        "pure/speculation/test_simulation.py::test_the_default_is_first_among_all_policies",
        "pure/speculation/test_tree_growth.py::test_replayed_trees_gain_where_batches_are_nearly_free_and_lose_nowhere",  # noqa: E501
        "pure/stream/test_page_size.py::test_weights_are_read_and_given_back_in_pages_of_the_system",  # noqa: E501
        "server/test_attack.py::test_an_attack_is_noticed_by_nobody_else",
        "server/test_lost_workers.py::test_a_lost_worker_of_ours_costs_one_request",
        "server/test_lost_workers.py::test_a_worker_that_hangs_in_the_middle_of_an_answer_is_lost",
        "server/test_lost_workers.py::test_ctrl_c_ends_run_while_its_worker_hangs_in_the_middle_of_an_answer",  # noqa: E501
        "server/test_models_program.py::test_models_share_two_devices",
        "server/test_serve_program.py::test_a_second_ctrl_c_does_not_wait_for_the_grace_time",
        "server/test_server_memory.py::test_a_servers_memory_does_not_grow_with_thousands_of_requests",
        "server/test_server_memory.py::test_an_engines_memory_does_not_grow_with_requests",
        "server/test_worker.py::test_a_server_goes_on_when_the_computing_process_has_died",
        "server/test_worker.py::test_only_activations_cross_the_network_in_one_round_trip",
        "server/test_worker.py::test_what_a_worker_measured_is_used_at_its_next_start",
        "server/test_worker_door.py::test_a_stranger_is_not_answered_while_layers_are_loaded",
    }
)
# How many cases of each of these scripts/test runs.
SAMPLED = {
    "abi/test_chat_templates.py::test_a_prompt_is_the_librarys": 8,
    "combinations/test_measuring.py::test_a_command_that_measures_runs_with_every_kind_of_memory": 4,  # noqa: E501
    "gpu/standin/test_doorbell_kills.py::test_a_stopped_thread_ends_its_engine_and_no_later_one_rings": 1,  # noqa: E501
    "gpu/standin/test_doorbell_kills.py::test_an_engine_that_is_killed_is_told_and_another_writes_the_same": 1,  # noqa: E501
    "gpu/standin/test_doorbell_kills.py::test_ctrl_c_ends_a_run_at_once_and_the_next_one_writes_the_same": 1,  # noqa: E501
    "gpu/test_gpu_ahead.py::test_layers_computed_ahead_without_all_experts_are_repaired": 2,
    "gpu/test_gpu_architectures.py::test_layers_split_on_the_device_have_the_resident_models_bits": 3,  # noqa: E501
    "gpu/test_gpu_equality.py::test_copies_through_the_pinned_ring_give_the_same": 1,
    "gpu/test_gpu_equality.py::test_experts_read_from_the_disk_are_resident": 3,
    "gpu/test_gpu_equality.py::test_one_token_at_a_time_through_the_fewest_slots_is_resident": 1,
    "gpu/test_gpu_equality.py::test_slots_sized_after_a_warm_up_give_the_same": 1,
    "gpu/test_gpu_equality.py::test_slots_that_layers_of_different_types_share_are_resident": 1,
    "gpu/test_gpu_equality.py::test_split_layers_from_the_disk_give_the_bits_of_those_in_memory": 1,
    "gpu/test_gpu_equality.py::test_streamed_is_resident": 5,
    "gpu/test_gpu_equality.py::test_the_threshold_holds_for_whole_decodes_kind_by_kind": 1,
    "gpu/test_gpu_prompts.py::test_a_prompt_of_several_ubatches_is_allocated_once": 2,
    "gpu/test_gpu_worker.py::test_streamed_on_a_worker_is_resident_here": 2,
    "gpu/test_host_inputs.py::test_inputs_take_the_planned_host_memory": 2,
    "model/test_architectures.py::test_all_ways_give_the_bits_of_the_cpu_alone": 5,
    "model/test_architectures.py::test_planned_buffers_of_long_contexts_hold_the_librarys": 3,
    "model/test_bad_input.py::test_contexts_that_the_library_rounds_up_hold_batches_of_all_their_tokens": 1,  # noqa: E501
    "model/test_block.py::test_a_block_draft_opens_beside_each_architecture": 5,
    "model/test_block.py::test_a_block_draft_opens_beside_each_mixture": 2,
    "model/test_block.py::test_a_draft_with_hyper_connections_drafts_for_deepseek4": 2,
    "model/test_block.py::test_each_draft_is_that_of_a_fresh_evaluation": 4,
    "model/test_block.py::test_greedy_texts_are_those_of_plain_decoding": 1,
    "model/test_chat.py::test_a_prompt_is_kept_in_a_file_for_the_next_run": 1,
    "model/test_computing_ahead.py::test_batches_of_every_size_are_repaired": 2,
    "model/test_computing_ahead.py::test_repairs_give_the_resident_models_bits": 6,
    "model/test_devices.py::test_a_session_over_two_devices_writes_what_one_does": 1,
    "model/test_devices.py::test_own_layers_draft_on_the_last_device": 1,
    "model/test_devices.py::test_two_devices_give_the_bits_of_one": 4,
    "model/test_disk.py::test_a_disk_that_stalls_is_waited_for_and_then_fails_the_request": 1,
    "model/test_disk.py::test_a_file_that_is_replaced_is_read_as_it_was": 1,
    "model/test_disk.py::test_experts_of_new_tokens_are_read_ahead_by_the_next_routers": 1,
    "model/test_disk.py::test_experts_that_a_token_chose_before_are_read_ahead": 1,
    "model/test_disk.py::test_libllamas_own_products": 3,
    "model/test_disk.py::test_memory_may_be_taken_away_at_any_time": 1,
    "model/test_disk.py::test_memory_stays_within_the_limit": 1,
    "model/test_disk.py::test_prompts_in_passes": 4,
    "model/test_disk.py::test_split_layers": 3,
    "model/test_disk.py::test_streamed_layers": 3,
    "model/test_eagle.py::test_each_draft_is_that_of_a_fresh_evaluation": 3,
    "model/test_eagle.py::test_greedy_texts_are_those_of_plain_decoding": 1,
    "model/test_gpu_check.py::test_a_layer_with_wrong_experts_breaks_the_limit": 1,
    "model/test_gpu_check.py::test_one_corrupt_row_breaks_the_limit": 1,
    "model/test_gpu_check.py::test_one_wrong_expert_breaks_the_limit": 2,
    "model/test_gpu_check.py::test_what_compute_sanitizer_finds_decides": 2,
    "model/test_grammars.py::test_an_ambiguous_grammar_ends_no_answer_that_was_begun": 1,
    "model/test_hub.py::test_a_hub_that_lies_writes_nothing_outside_of_its_cache": 2,
    "model/test_hybrid.py::test_a_split_layer_gives_the_resident_models_bits": 6,
    "model/test_hybrid.py::test_every_size_of_a_batch_gives_the_resident_models_bits": 2,
    "model/test_hybrid.py::test_no_token_is_shown_a_slot_twice": 2,
    "model/test_hybrid_model.py::test_a_computed_row_is_the_pages_and_never_slower_than_a_rival_or_without_splits": 2,  # noqa: E501
    "model/test_hybrid_model.py::test_a_computed_row_on_mtp_is_the_pages": 1,
    "model/test_hybrid_model.py::test_a_plan_by_counted_hits_is_never_behind_the_other": 1,
    "model/test_hybrid_model.py::test_no_computed_batch_is_slower_with_splits_and_its_row_is_the_pages": 2,  # noqa: E501
    "model/test_kept_noise.py::test_a_disturbed_measurement_of_links_costs_a_plan_nothing": 2,
    "model/test_kept_noise.py::test_a_disturbed_measurement_of_the_disk_costs_a_plan_nothing": 2,
    "model/test_large_pages.py::test_a_mixture_opens_and_decodes_with_large_pages": 1,
    "model/test_launch_lines.py::test_a_published_bench_line_benches_and_its_log_is_imported": 1,
    "model/test_launch_lines.py::test_a_published_line_starts_and_answers": 2,
    "model/test_lone_requests.py::test_logits_do_not_depend_on_what_was_asked_before": 8,
    "model/test_lossless.py::test_the_text_is_the_targets_own": 6,
    "model/test_lossless_ends.py::test_a_draft_never_passes_the_end_of_the_context": 4,
    "model/test_lossless_ends.py::test_the_end_of_a_grammar_inside_a_draft_ends_the_text": 3,
    "model/test_lossless_recurrent.py::test_drafts_that_are_right_to_any_depth_leave_no_trace": 15,
    "model/test_lossless_recurrent.py::test_wrong_drafts_of_all_lengths_leave_no_trace": 3,
    "model/test_lossless_vocabulary.py::test_another_vocabulary_is_translated_without_loss": 2,
    "model/test_mtp.py::test_a_kept_prompt_drafts_what_a_fresh_one_does": 2,
    "model/test_mtp.py::test_a_saved_text_drafts_what_a_fresh_one_does": 3,
    "model/test_mtp.py::test_each_draft_is_that_of_a_fresh_evaluation": 3,
    "model/test_mtp.py::test_texts_and_drafts_are_the_same_if_prompts_are_computed_in_passes": 3,
    "model/test_mtp_matrix.py::test_greedy_texts_are_those_of_plain_decoding": 2,
    "model/test_mtp_sampled.py::test_sampled_text_has_the_target_s_distribution": 1,
    "model/test_numa_commands.py::test_one_node_says_in_one_line_that_no_thread_is_bound": 1,
    "model/test_our_worker.py::test_a_worker_computes_the_passes_of_block_drafts": 2,
    "model/test_our_worker.py::test_layers_of_two_machines_give_the_logits_of_one": 1,
    "model/test_our_worker.py::test_prompts_that_a_worker_computes_in_passes_give_the_logits_of_one_machine": 2,  # noqa: E501
    "model/test_pass_equality.py::test_experts_of_every_type_have_the_resident_models_logits": 3,
    "model/test_pass_equality.py::test_passes_on_two_devices_have_the_resident_models_bits": 4,
    "model/test_plan_memory.py::test_caches_and_buffers_of_long_contexts": 4,
    "model/test_plan_memory.py::test_it_follows_the_options": 7,
    "model/test_plan_memory.py::test_what_is_used_is_within_3_percent_or_200_megabytes": 4,
    "model/test_plan_shapes.py::test_a_first_start_measures_r1_in_time": 3,
    "model/test_plan_shapes.py::test_every_plan_fits_and_says_what_its_slots_do_not_hold": 2,
    "model/test_plan_shapes.py::test_no_batch_takes_longer_than_a_larger_one_or_than_its_parts": 4,
    "model/test_repacking.py::test_all_layouts_compute_the_same": 1,
    "model/test_rpc.py::test_only_activations_cross_the_network_in_one_round_trip": 1,
    "model/test_shared_slots.py::test_a_choice_that_is_no_expert_ends_the_decode_and_not_the_process": 6,  # noqa: E501
    "model/test_shared_slots.py::test_streamed_is_resident_for_every_slot_count": 3,
    "model/test_slots.py::test_a_prompt_among_others_gets_the_answer_it_gets_alone": 2,
    "model/test_slots.py::test_drawn_and_chained_drafts_are_made_together_and_change_no_answer": 1,
    "model/test_split_watch.py::test_while_answering_it_goes_over_to_what_is_faster_and_back": 1,
    "model/test_stages.py::test_a_signal_ends_a_prompt_on_both_devices": 1,
    "model/test_stages.py::test_an_ubatch_that_is_computed_late_has_the_bits_of_one_device": 1,
    "model/test_stages.py::test_ubatches_at_the_same_time_have_the_bits_of_one_device": 3,
    "model/test_streaming.py::test_streamed_is_resident_for_every_option_and_slot_count": 6,
    "model/test_synth.py::test_a_full_shape_is_the_published_one_and_its_header_alone_says_all": 12,
    "model/test_synth_routing.py::test_experts_are_used_again_as_published": 1,
    "model/test_tables.py::test_a_table_on_the_disk_gives_the_same_bits": 4,
    "model/test_threads.py::test_every_strategy_and_thread_count_gives_the_same_bits": 2,
    "model/test_trees.py::test_trees_write_the_targets_own_texts": 1,
    "model/test_vocabulary_pairs.py::test_another_tokenizer_drafts_without_loss": 8,
    "model/test_worker_operations.py::test_a_clients_graphs_are_in_the_record": 3,
    "pure/chat/test_clients.py::test_messages_in_any_order": 10,
    "pure/chat/test_schema_suite.py::test_no_schema_is_enforced_wrongly_without_a_word": 40,
    "pure/chat/test_sent_back.py::test_any_parts_of_an_answer_are_taken_back": 60,
    "pure/chat/test_tool_schemas.py::test_what_cannot_be_followed_is_left_out_of_optional_calls": 40,  # noqa: E501
    "pure/times/test_learner.py::test_after_the_rates_change_the_best_way_is_soon_found_and_little_is_lost": 1,  # noqa: E501
    "pure/times/test_search.py::test_a_first_start_is_within_a_tenth_of_exhaustive_measurement": 1,
    "pure/times/test_search.py::test_a_slow_machines_first_start_leaves_the_policy_what_the_whole_curve_would": 2,  # noqa: E501
    "pure/house/test_nothing_tested.py::test_a_run_in_which_no_test_passes_is_not_a_success": 8,
    "pure/memory_nodes/test_numa_place.py::test_every_weight_is_read_locally_with_small_pages_and_with_huge_ones_where_they_fit": 8,  # noqa: E501
    "pure/speculation/test_decoding_loop.py::test_members_come_and_go_and_each_writes_its_own_plain_text": 4,  # noqa: E501
    "pure/speculation/test_policies.py::test_a_text_that_stays_as_it_is_is_learnt_and_plain_decoding_kept": 3,  # noqa: E501
    "pure/speculation/test_policies.py::test_throughput_beats_every_other_policy_in_the_mean": 3,
    "pure/speculation/test_policies.py::test_throughput_is_near_the_fixed_oracle_and_never_loses": 10,  # noqa: E501
    "pure/speculation/test_policies.py::test_throughput_is_near_the_oracle_on_curves_it_was_not_made_with": 1,  # noqa: E501
    "pure/speculation/test_same_size.py::test_the_default_is_no_slower_than_the_best_fixed_setting": 3,  # noqa: E501
    "pure/speculation/test_spec_accept.py::test_a_sampled_model_draft_keeps_the_distribution_through_the_loop": 1,  # noqa: E501
    "pure/speculation/test_spec_accept.py::test_the_first_two_tokens_are_distributed_as_without_a_draft": 2,  # noqa: E501
    "pure/stream/test_player_programs.py::test_a_wrong_table_stops_the_program_or_does_no_harm": 4,
    "pure/stream/test_player_programs.py::test_late_experts_that_are_not_the_layers_stop_the_program": 2,  # noqa: E501
    "server/test_damaged_weights.py::test_logits_that_are_no_numbers_are_one_sentence_and_no_text": 5,  # noqa: E501
    "server/test_first_byte.py::test_the_header_and_the_role_do_not_wait_for_the_first_token": 2,
    "server/test_lost_workers.py::test_a_lost_worker_costs_one_request": 1,
    "server/test_lost_workers.py::test_a_missing_worker_beside_other_devices_is_one_sentence": 1,
    "server/test_lost_workers.py::test_a_worker_that_dies_during_the_start_is_one_sentence": 1,
    "server/test_lost_workers.py::test_a_worker_that_is_missing_at_the_start_is_one_sentence": 1,
    "server/test_lost_workers.py::test_run_ends_with_one_sentence_if_its_worker_is_lost": 1,
    "server/test_serve_program.py::test_a_model_that_does_not_load_ends_the_program": 1,
    "server/test_serve_program.py::test_a_signal_ends_a_busy_server_and_its_engine": 1,
    "server/test_worker.py::test_a_worker_measures_at_its_start_which_experts_the_cpu_computes": 1,
    "server/test_worker.py::test_a_worker_that_streams_computes_the_same_logits": 1,
    "server/test_worker.py::test_bad_flags_are_one_sentence": 2,
    "server/test_worker.py::test_signals_end_it_cleanly": 1,
}


IS_SAMPLED = "SPECOFFLOAD_TESTS_SAMPLED"  # a variable that is set in runs with --sample


def examples(n: int) -> int:
    """Return how many examples a costly hypothesis test tries: `n`, a quarter in a sample."""
    return max(3, n // 4) if os.environ.get(IS_SAMPLED) else n


def function_of(node_id: str) -> str:
    """Return the test's file and function, as the tables above name them."""
    return node_id.partition("[")[0].removeprefix("tests/")


def is_wide(node_id: str) -> bool:
    """True if `scripts/test` leaves out this test, or some cases of it."""
    function = function_of(node_id)
    return function in LONG or function in SAMPLED


def sample(node_ids: Collection[str], seed: int) -> set[str]:
    """Return the tests that `scripts/test` runs. Equal seeds choose equal samples."""
    chosen = {node_id for node_id in node_ids if not is_wide(node_id)}
    cases: dict[str, list[str]] = defaultdict(list)
    for node_id in node_ids:
        if (function := function_of(node_id)) in SAMPLED:
            cases[function].append(node_id)
    for function, its in cases.items():
        draw = random.Random(f"{seed} {function}")
        chosen |= set(draw.sample(sorted(its), min(SAMPLED[function], len(its))))
    return chosen


def share_of_files(node_ids: Iterable[str], n: int, seed: int) -> set[str]:
    """Return the tests of a random nth of the files. Equal seeds choose equal files."""
    by_file: dict[str, set[str]] = defaultdict(set)
    for node_id in node_ids:
        by_file[node_id.partition("::")[0]].add(node_id)
    n_files = math.ceil(len(by_file) / n)
    files = random.Random(f"{seed} files").sample(sorted(by_file), n_files)
    return {node_id for file in files for node_id in by_file[file]}
