"""Faults to plant in a copy of the package, each of them one broken promise, and the test that finds it.

A fault is known by what breaks for a user: that stays true when the code is written anew. Its place and its
change (see `operators`) say where today's code keeps the promise, whatever the module. Who moves that code
gives the fault its new place; who cannot has perhaps moved the promise out of it.

`make test` holds that each fault can be planted in one place, `make soak` that each is found. `python -m
tests.faults` plants them and prints by which test each is found.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.faults.operators import (
    Change,
    File,
    Place,
    argument,
    bare,
    becomes,
    block,
    call,
    compare,
    condition,
    constant,
    expression,
    function,
    inner,
    left_out,
    loosened,
    negated,
    plus,
    preceded_by,
    read_package,
    returned,
    returns_at_once,
    stale,
    statement,
    swapped,
    turned,
)

__all__ = ["FAULTS", "Fault", "copy_project", "copy_with", "planted"]


@dataclass(frozen=True, slots=True)
class Fault:
    """The promise that breaks, the place of the code that keeps it, and the change that breaks it.

    `found_by`: the test below `tests/contract` that fails under the fault, with one of its parameters at least.
    """

    breaks: str
    place: Place
    change: Change
    found_by: str

    @property
    def name(self) -> str:
        return self.breaks.replace(" ", "-")

    @property
    def test(self) -> str:
        return f"tests/contract/{self.found_by}"


# fmt: off
FAULTS: Final = (
    # --- the directory: its limit, its files, its books
    Fault("bytes that are being written count as used",
          expression("room_in", "tables.bytes_of_files()"), becomes("tables.bytes_in('live')"),
          "test_p04_limit.py::test_shards_that_are_written_at_once_count_before_they_are_there"),
    Fault("a limit that is lowered holds at once",
          statement("Cache.size_limit", "_shrink"), left_out,
          "test_p04_limit.py::test_a_lower_limit_holds_at_once_and_a_higher_one_is_filled"),
    Fault("min_free of the disk stays free",
          returned("effective_limit"), becomes("limit_bytes"),
          "test_p04_limit.py::test_min_free_of_the_disk_stays_free"),
    Fault("a setting that another process changes holds here",
          function("Cache._setting"), stale,
          "test_p04_limit.py::test_a_limit_that_one_process_changes_is_that_of_all"),
    Fault("a setting that cannot be stored is not changed",
          statement("change_settings", "write_settings"), preceded_by("_write(directory.spare_settings, settings)"),
          "test_full_disk.py::test_a_limit_that_cannot_be_stored_is_refused_and_changes_nothing"),
    Fault("200GB are decimal",
          constant("parse_size", 1000), becomes("1024"),
          "test_cache.py::test_a_limit_is_bytes_or_text_and_is_kept_in_the_cache"),
    Fault("no more is evicted than has to be",
          expression("choose_victims", "row.size_bytes"), becomes("row.num_samples"),
          "test_cache.py::test_a_policy_evicts_first_what_it_says_and_no_more_than_is_needed"),
    Fault("what eviction frees is gone from the disk",
          statement("Reservations._unlink", "_remove_files"), left_out,
          "test_p04_limit.py::test_evict_and_clear_free_what_they_say"),
    Fault("what no epoch has used is not evicted",
          call("Reservations.reserve", "_victims"), argument("used_only", "False"),
          "test_p10_fetched_is_trained_on.py::test_a_full_cache_rests_until_an_epoch_uses_it_and_then_replaces_what_the_next_one_leaves"),
    Fault("eviction takes what was used longest ago",
          call("Tables.mark_used", "executemany"), argument(0, "{}.replace('last_used = ?', 'last_used = last_used + 0 * ?')"),
          "test_cache.py::test_a_policy_evicts_first_what_it_says_and_no_more_than_is_needed"),
    Fault("a full cache turns over while an epoch holds it",
          function("bytes_to_leave"), returns_at_once("0"),
          "test_p10_fetched_is_trained_on.py::test_a_full_cache_rests_until_an_epoch_uses_it_and_then_replaces_what_the_next_one_leaves"),
    Fault("an epoch leases all its shards",
          call("_leased", "ranges_of"), argument(1, "chosen[:-1]"),
          "test_p05_leases.py::test_no_shard_of_a_snapshot_is_evicted_while_it_is_open_and_all_are_when_it_is_closed"),
    Fault("a dataset in another process holds its lease",
          call("EpochDataset.__setstate__", "join_lease"), becomes("None"),
          "test_p05_leases.py::test_a_copy_of_a_dataset_holds_its_shards_when_the_first_is_closed"),
    Fault("a short epoch takes the least used samples",
          expression("select_shards", "uses[chosen]"), becomes("-uses[chosen]"),
          "test_cache.py::test_a_snapshot_is_a_dataset_of_all_or_of_the_least_used_shards"),
    Fault("an epoch is drawn from what is cached by then",
          compare("ReusableSnapshots._reuse", "revision"), becomes("False"),
          "test_p02_epochs.py::test_an_epoch_has_what_a_worker_has_brought_that_came_and_went_since_the_last"),
    Fault("a shard and the progress of its units are one transaction",
          block("Publisher.commit", "translated_disk_errors"), preceded_by("shards and self.commit((), pass_id, (), progress)"),
          "test_crashes.py::test_a_process_that_is_killed_as_a_shard_gets_its_name_costs_no_sample"),
    Fault("what replaces the settings is on the disk before",
          statement("replace_file", "fsync"), left_out,
          "test_crashes.py::test_settings_are_on_the_disk_before_they_take_the_place_of_the_old_ones"),
    Fault("a limit outlives the file of the settings",
          expression("find_settings", "_read(directory.spare_settings)"), becomes("None"),
          "test_i06_lost_catalogue.py::test_a_cache_that_lost_its_catalogue_or_its_settings_has_its_samples_and_its_settings"),
    Fault("root changes nothing in a users cache",
          function("check_own"), returns_at_once("None"),
          "test_cache.py::test_root_looks_at_a_users_cache_and_changes_nothing_in_it"),
    Fault("unknown files among the shards count as used",
          function("count_strays"), returns_at_once("None"),
          "test_p04_limit.py::test_files_that_the_cache_does_not_know_count_wherever_they_lie"),
    Fault("a wait ends in time while the catalogue is locked",
          returned("Catalogue._lock_timeout_s"), becomes("LOCK_TIMEOUT_S"),
          "test_i10_deadlines.py::test_a_wait_ends_at_its_deadline_while_another_process_holds_the_catalogue"),
    Fault("a catalogue that was in use when the machine restarted is not believed",
          condition("_trouble", "boot_id"), becomes("True"),
          "test_power_cut.py::test_a_catalogue_that_lost_a_part_of_its_changes_is_not_believed"),
    Fault("a cache that was closed before the machine restarted goes on where it was",
          statement("Cache.close", "seal_catalogue"), becomes("pass"),
          "test_power_cut.py::test_an_orderly_restart_loses_neither_the_place_in_the_pass_nor_what_was_counted"),
    Fault("damaged columns do not pass for whole ones",
          compare("ShardData.check", "checksums"), becomes("False"),
          "test_cache.py::test_damage_is_found_put_aside_and_fetched_again"),
    Fault("a damaged shard is fetched again",
          statement("Cache.quarantine", "evicted_shards"), left_out,
          "test_damaged_shards.py::test_what_training_finds_damaged_is_left_out_and_fetched_again_by_the_worker_that_rests"),
    Fault("a lost catalogue is made from the shards with what they hold",
          function("_origin"), returns_at_once("0, []"),
          "test_cache.py::test_a_lost_catalogue_is_made_again_from_the_shards_and_the_settings"),
    Fault("files that belong to nobody are named and removed",
          returned("_unknown_files"), becomes("[]"),
          "test_cache.py::test_damage_is_found_put_aside_and_fetched_again"),
    Fault("the books are compared with the files",
          statement("check_sizes", "wrong", "actual_bytes", "shard_id"), left_out,
          "test_i12_books.py::test_a_file_that_has_grown_is_noticed_when_the_cache_is_opened_and_counts"),
    Fault("a cache is not cleared while a worker fills it",
          block("Cache.clear", "supervisor_lock"), bare,
          "test_cache.py::test_a_cleared_cache_keeps_its_settings_and_takes_another_source"),
    Fault("wait returns when as many samples are cached",
          compare("wait_for_samples", "have", "wanted"), becomes("{} - 1"),
          "test_cache.py::test_waiting_ends_with_the_number_of_samples_or_says_what_is_missing"),
    Fault("the size of a cache is that of its directory",
          returned("occupied_bytes"), becomes("shard_bytes"),
          "test_cache.py::test_what_a_cache_says_of_itself_is_what_is_on_the_disk"),
    # --- the worker
    Fault("a second start attaches to the worker that runs",
          statement("_start_or_attach", "is_running", "has_worker"), becomes("is_running = False"),
          "test_p03_filler.py::test_a_worker_outlives_trainers_that_crash_and_the_next_start_finds_it_at_work"),
    Fault("a sampling process that dies is replaced",
          function("SamplingProcesses._reap"), returns_at_once("None"),
          "test_p03_filler.py::test_a_sampling_process_that_is_killed_is_restarted_and_costs_nothing"),
    Fault("the units of a process that died are read by another one",
          statement("PositionQueue.give_back", "_wait"), left_out,
          "test_p03_filler.py::test_a_sampling_process_that_is_killed_is_restarted_and_costs_nothing"),
    Fault("a worker that was killed is replaced",
          statement("WorkerMonitor._look", "_replace"), left_out,
          "test_i13_watched_filler.py::test_a_killed_supervisor_is_replaced_by_the_process_that_needs_it_while_it_fills_and_while_it_rests"),
    Fault("a worker that is asked to stop stops",
          function("Attachments.stop_requested"), returns_at_once("False"),
          "test_worker.py::test_stop_ends_it_for_all_who_need_it_and_wait_tells_that_the_pass_is_not_complete"),
    Fault("a worker that nobody needs ends",
          returned("Attachments.is_needed"), becomes("True"),
          "test_p03_filler.py::test_a_worker_serves_its_jobs_to_the_last_and_goes_with_it_and_the_next_one_resumes"),
    Fault("a detached worker outlives its caller",
          call("Attachments.is_needed", "_is_requested"), becomes("False"),
          "test_worker.py::test_a_detached_worker_outlives_its_caller_and_is_stopped_by_another"),
    Fault("a process that hangs is killed",
          function("SamplingProcess.kill_if_hanging"), returns_at_once("None"),
          "test_start_worker.py::test_a_sample_that_hangs_is_left_out_after_its_time_and_the_others_come"),
    Fault("filling goes on after the last sample that was cached",
          statement("PendingProgress.add_samples", "_advanced", "position"), becomes("self._advanced[position] = stop + 1"),
          "test_sources_conformance.py::test_a_worker_that_ends_in_mid_pass_and_a_cache_that_lost_half_are_completed"),
    Fault("a full cache is not changed where the filling is to wait",
          statement("Requests._give_space", "may_evict", "when_full"), becomes("may_evict = True"),
          "test_start_worker.py::test_a_full_cache_is_left_as_it_is_and_filled_on_when_its_limit_is_raised"),
    Fault("a worker that is to stop when the cache is full ends",
          compare("Supervisor._should_end", "when_full"), becomes("False"),
          "test_p04_limit.py::test_a_worker_that_is_to_stop_at_the_limit_ends_there"),
    Fault("shard_size is the size of shards",
          statement("WorkerOptions._shard_bytes", "shard_bytes", "parse_size", "shard_size"),
          becomes("shard_bytes = min(parse_size(DEFAULT_SHARD), usable)"),
          "test_start_worker.py::test_a_shard_is_full_at_its_size"),
    Fault("nodes read different units",
          returned("Partition.units"), becomes("places * self.count"),
          "test_start_worker.py::test_the_shares_of_nodes_are_disjoint_and_complete_whatever_order_and_seed"),
    Fault("the order of filling is of the seed",
          call("UnitOrder.__init__", "mix_key"), argument(1, "0"),
          "test_start_worker.py::test_the_order_is_that_of_the_source_or_of_the_seed"),
    Fault("a sample that cannot be used is counted",
          statement("SampleEncoder._add", "transform", "skip"), left_out,
          "test_commands_that_fill.py::test_what_was_skipped_is_told_with_its_reason_and_a_worker_that_kept_nothing_is_a_problem"),
    Fault("a transform draws the same for a sample in every run",
          call("Transformer.apply", "sample_generator"), becomes("__import__('numpy').random.default_rng()"),
          "test_start_worker.py::test_a_transform_may_drop_a_sample_make_several_of_it_and_draw"),
    Fault("the bandwidth limit holds",
          returned("Throttle.reserve"), becomes("0.0"),
          "test_start_worker.py::test_the_bandwidth_limit_holds_for_all_processes_together_from_the_first_byte_on"),
    # --- the way to the remote
    Fault("a part that was not asked for is refused",
          condition("_place_of", "fits"), becomes("False"),
          "test_answers_of_servers.py::test_a_part_that_is_not_the_one_asked_for_is_an_error_and_no_sample"),
    Fault("parts of two versions are not mixed",
          condition("Version.merged", "resized"), becomes("False"),
          "test_answers_of_servers.py::test_parts_of_two_versions_are_not_mixed"),
    Fault("a final error is not tried again",
          compare("_mapped", "_TRANSIENT"), becomes("True"),
          "test_answers_of_servers.py::test_answers_of_web_servers_are_retried_skipped_or_final"),
    Fault("a body that breaks off goes on where it broke off",
          function("Download._may_resume"), returns_at_once("False"),
          "test_answers_of_servers.py::test_a_wrong_answer_now_and_then_costs_no_sample_and_no_opening"),
    Fault("every call to a server has a deadline",
          statement("result_of", "deadline_s", "timeout_s"), becomes("{} + 3600"),
          "test_answers_of_servers.py::test_a_call_that_does_not_return_is_given_up_as_a_remote_that_is_away"),
    Fault("no error shows a secret",
          call("_mapped", "redact_text"), inner(),
          "test_secrets.py::test_nothing_that_takes_a_url_shows_its_secrets"),
    Fault("no URL is shown with its password",
          function("redact"), returns_at_once("url"),
          "test_secrets.py::test_nothing_that_takes_a_url_shows_its_secrets"),
    Fault("an object above max_object_size is not read",
          compare("check", "nbytes", "most"), becomes("False"),
          "test_source_options.py::test_an_object_above_its_bound_is_skipped_with_its_reason"),
    # --- listing
    Fault("the last number of a range belongs to it",
          call("_alternatives", "range"), argument(1, "int(last)"),
          "test_names_of_files.py::test_a_range_has_both_of_its_ends"),
    Fault("hidden files are left out",
          call("visible", "startswith"), becomes("False"),
          "test_names_of_files.py::test_a_folder_has_what_is_below_it_and_nothing_hidden"),
    Fault("recursive=False keeps the files of the folder itself",
          condition("open_pages", "recursive", "isdir"), becomes("os.path.isdir(path)"),
          "test_names_of_files.py::test_a_folder_has_what_is_below_it_and_nothing_hidden"),
    # --- sources
    Fault("a label is the rank of its folder among the sorted names",
          call("FileSource._label_by", "sorted"), becomes("sorted(folders, reverse=True)"),
          "test_source_options.py::test_labels_are_the_ranks_of_the_folders_that_hold_images"),
    Fault("an image is red, green, blue",
          call("_planes", "enumerate"), argument(0, "reversed({})"),
          "test_p01_any_source.py::test_images_in_folders_of_classes_become_one_tensor_with_labels"),
    Fault("a resize is to height and width",
          expression("ImageOptions.resized", "(self.resize[1], self.resize[0])"), swapped(0, 1),
          "test_source_options.py::test_image_options_resize_as_pillow_does_and_crop_the_middle"),
    Fault("an image is upright",
          function("_orientation"), returns_at_once("1"),
          "test_sound_files.py::test_a_png_with_large_texts_or_a_large_profile_is_read"),
    Fault("an array of the other byte order keeps its values",
          call("decode_npy", "astype"), becomes('array.view(dtype.newbyteorder("="))'),
          "test_layouts_of_arrays.py::test_an_array_keeps_its_values_in_any_byte_order_and_in_rows_or_columns"),
    Fault("the last window of an array reaches its end",
          expression("WindowGrid.counts", "-(-(length - size) // stride) + 1"), becomes("(length - size) // stride + 1"),
          "test_layouts_of_arrays.py::test_the_last_window_of_a_grid_ends_with_the_array"),
    Fault("a record with a wrong checksum is left out",
          returned("_crcs_match"), becomes("np.ones(len(places), np.bool_)"),
          "test_source_options.py::test_a_wrong_checksum_costs_a_record_unless_none_is_checked"),
    Fault("a sample of a tar has the name up to the first dot",
          call("split_name", "partition", "base", "."), becomes('base.rpartition(".")'),
          "test_p01_any_source.py::test_a_tar_is_sampled_by_its_members_names"),
    Fault("the key of a row is its number in the file",
          statement("ParquetFormat.parts", "firsts", "cumsum"), becomes("firsts = np.cumsum(rows)"),
          "test_sources_conformance.py::test_a_format_gives_the_samples_that_were_written"),
    Fault("the default of a field takes the place of what is missing",
          compare("Defaults.fill", "value", "None"), turned,
          "test_source_options.py::test_defaults_of_datasets_and_iterables_stand_for_what_is_missing"),
    Fault("a mixture is filled in proportion to its weights",
          returned("_whole_numbers"), becomes("[1 for _ in numbers]"),
          "test_p01_any_source.py::test_every_kind_of_source_brings_each_sample_into_the_batches_of_an_epoch_once"),
    # --- training
    Fault("a resume begins with the next batch",
          expression("Segment.position_after", "done - self.position.done"), plus(-1),
          "test_p09_resume.py::test_a_state_counts_the_batches_that_were_given_and_not_those_gathered_ahead"),
    Fault("ranks get different samples",
          expression("Plan.spans", "rank * shares"), becomes("0 * shares"),
          "test_p08_ranks.py::test_ranks_share_each_epoch_of_one_cache_in_equal_steps"),
    Fault("all ranks make the same steps",
          call("Preparer._agree", "agree", "mine"), becomes("[mine for _ in {}]"),
          "test_p08_ranks.py::test_ranks_with_unequal_caches_make_as_many_steps_as_the_smaller_one_has"),
    Fault("every epoch has another order",
          call("DrawContext.key", "mix_key"), argument(1, "0"),
          "test_epoch_loader.py::test_shuffle_draws_every_sample_once_in_an_order_of_seed_and_epoch"),
    Fault("an epoch waits for min_samples",
          call("Preparer._wait_for_samples", "wait_for_samples"), argument(1, "whole"),
          "test_epoch_loader.py::test_min_samples_is_waited_for"),
    Fault("the recorded epochs are those that were trained on",
          statement("Recorder._write", "save_manifest"), left_out,
          "test_p09_resume.py::test_recorded_epochs_come_again_batch_by_batch"),
    Fault("the rest of an epoch is dropped where it is to be dropped",
          expression("count_batches", "not drop_last"), becomes("True"),
          "test_p02_epochs.py::test_a_loader_has_as_many_batches_as_it_says"),
    Fault("the rest of an epoch is a batch if it has a sample for each rank",
          compare("count_batches", "rest"), loosened,
          "test_p02_epochs.py::test_a_loader_has_as_many_batches_as_it_says"),
    Fault("what is held out is not trained on",
          compare("Split.rows", "held_out"), becomes("({}) | (hashes % 16 == 0)"),
          "test_epoch_loader.py::test_holdout_splits_the_samples_by_their_keys"),
    Fault("a condition selects the samples for which it holds",
          call("View._select", "flatnonzero"), argument(0, "~mask"),
          "test_epoch_loader.py::test_where_draws_the_samples_that_a_mask_selects_and_asks_once_for_each_shard"),
    Fault("samples are drawn in proportion to their weights",
          expression("draw", "weights if total else np.ones(len(weights))"), becomes("np.ones(len(weights))"),
          "test_epoch_loader.py::test_weights_say_how_often_a_sample_comes_and_can_be_changed"),
    Fault("sources are trained on in the proportion of the mixture",
          statement("apportion", "shares", "rows"), becomes("shares = batch * np.ones_like(rows) / sources"),
          "test_epoch_loader.py::test_a_mixture_is_exact_after_every_batch_and_may_change_by_step_and_by_epoch"),
    Fault("a batch has at most max_tokens",
          call("group_by_length", "clip"), argument(0, "{} + 1"),
          "test_epoch_loader.py::test_max_tokens_bounds_the_longest_of_a_batch_times_its_samples"),
    Fault("a batch transform draws the same in every run",
          call("SegmentReader._transform_of", "manual_seed"), becomes("torch.default_generator"),
          "test_epoch_loader.py::test_a_batch_transform_has_every_batch_and_a_generator_of_its_own"),
    Fault("a batch transform draws anew for every batch",
          call("SegmentReader._transform_of", "mix_key"), argument(1, "0"),
          "test_epoch_loader.py::test_a_batch_transform_has_every_batch_and_a_generator_of_its_own"),
    Fault("a batch transform draws on each rank its own",
          call("Preparer._make_segment", "mix_key"), argument(2, "0"),
          "test_p08_ranks.py::test_the_generator_of_a_batch_transform_is_another_one_on_each_rank"),
    Fault("a batch that was changed sample by sample is collated as it was changed",
          function("SampleBatch.whole"), returns_at_once("to_container(self._columns, self._schema)"),
          "test_p02_epochs.py::test_samples_that_are_changed_before_they_are_collated_stay_changed"),
    Fault("looking at the next batch does not change it",
          call("Epochs.peek", "deepcopy"), inner(),
          "test_epoch_loader_use.py::test_a_peek_is_a_copy_of_the_next_batch_and_moves_nothing"),
    Fault("stream gives the loader its options",
          call("stream", "_selected", "EpochLoader"), becomes("dict()"),
          "test_stream.py::test_options_of_all_parts_reach_them"),
    # --- on top
    Fault("a checkpoint after an epoch's last batch begins with the next one",
          call("_state", "_state"), argument("leaves", "False"),
          "test_frameworks.py::test_a_lightning_fit_resumed_from_any_checkpoint_gives_the_batches_of_the_uninterrupted_fit"),
    Fault("the Trainer counts the samples that it was trained on",
          returned("CacheTrainer.num_examples", "world_size"), becomes("len(dataloader)"),
          "test_frameworks.py::test_the_trainer_of_hugging_face_reports_the_samples_that_it_was_trained_on"),
    Fault("a problem that is found ends in exit code 1",
          condition("verify", "ok", "report"), negated,
          "test_commands_of_a_cache.py::test_verify_finds_damage_and_repairs_it_when_it_is_told_to"),
    Fault("wrong use ends in exit code 2",
          call("main", "exit", "USAGE"), argument(0, "PROBLEM"),
          "test_commands_of_a_cache.py::test_wrong_use_is_one_clear_message_and_changes_nothing"),
    Fault("data go to stdout",
          statement("_write", "stdout", "line"), becomes("sys.stderr.write(line + chr(10))"),
          "test_commands_of_a_cache.py::test_status_says_in_json_what_it_says_in_python_and_in_words_the_same"),
    Fault("the dashboard asks for its token",
          function("_matches"), returns_at_once("True"),
          "test_commands_that_look_ahead.py::test_nobody_reads_a_dashboard_without_its_token"),
    Fault("the metrics have the values of the status",
          expression("_add_status", "value(status)"), plus(1),
          "test_commands_that_look_ahead.py::test_the_metrics_are_those_of_the_guide_with_the_values_of_the_status"),
    Fault("a loader counts what it has delivered",
          statement("Batches.__next__", "counts", "samples"), left_out,
          "test_epoch_loader_use.py::test_stats_and_metrics_count_what_was_delivered"),
    Fault("a slow transform is named as the bottleneck",
          expression("Stages.seconds", "many.each(many.spent.transform_s)"), becomes("0.0"),
          "test_commands_that_look_ahead.py::test_the_verdict_names_the_stage_that_holds_the_filling_up"),
    Fault("the price of a plan is of what is fetched",
          expression("Plan.of", "forecast.fetched_bytes / 1e9 * price_per_gb"),
          becomes("forecast.fetched_bytes / 1e9"),
          "test_commands_that_look_ahead.py::test_a_run_is_forecast_with_its_egress_its_price_and_a_picture"),
    Fault("a shard that comes back different is refused",
          compare("_Maker.make", "content_hash"), becomes("False"),
          "test_commands_of_a_cache.py::test_refetch_brings_recorded_shards_back_byte_for_byte_and_says_what_did_not_come"),
    Fault("bench tells the share of memcpy",
          expression("BenchReport.to_dict", "self.alone.bytes_per_s / self.memcpy_bytes_per_s"),
          becomes("self.memcpy_bytes_per_s / self.alone.bytes_per_s"),
          "test_commands_of_a_cache.py::test_bench_measures_the_loader_with_the_users_transform_beside_memcpy"),
)
# fmt: on


def planted(package: Path, fault: Fault) -> tuple[File, str]:
    """The module of `package` in which `fault` is planted, and its text with the fault.

    Raises ValueError if the place is not exactly one.
    """
    places = [(file, node) for file in read_package(package) for node in fault.place.find(file)]
    if len(places) != 1:
        found = [f"{file.path}:{getattr(node, 'lineno', 0)}" for file, node in places]
        raise ValueError(f"{fault.breaks}: its place is to be one, and is {found or 'gone'}")
    ((file, node),) = places
    return file, file.edited(fault.change(file, node))


def copy_with(root: Path, folder: Path, fault: Fault) -> None:
    """Copy the project at `root` into `folder`, with `fault`."""
    copy_project(root, folder)
    file, text = planted(root / "cachestream", fault)
    (folder / file.path.relative_to(root)).write_text(text, encoding="utf-8")


def copy_project(root: Path, folder: Path) -> None:
    """Copy from `root` what its tests run with into `folder`; what Python has compiled stays valid there."""
    for name in ("cachestream", "tests"):
        shutil.copytree(root / name, folder / name)
    shutil.copy(root / "pyproject.toml", folder)
