"""Cases that `make test` leaves to `make test-long`.

Of each of these tests only the cases at these places run in `make test`: together they have every strategy, kind and
number of ranks that matters, and not every one with every other. The rest is marked `long`. (Of a ring of strategies,
in which each reads the checkpoint of another, every second pair: what is then never trained from the start on its own
is trained from the checkpoint of another.)
"""


def out_of_range(cases: dict[str, int]) -> list[str]:
    """Return the tests with a place that no case has, by the number of cases of each test that was collected."""
    return [test for test, places in SAMPLED.items() if test in cases and max(places, default=-1) >= cases[test]]


SAMPLED: dict[str, tuple[int, ...]] = {
    "ranks/test_batchnorm.py::test_many_ranks_have_the_running_statistics_of_plain_pytorch": (1, 3),
    "ranks/test_bytes.py::test_bytes_follow_the_formula": (0, 2, 4, 8, 10, 14),
    "ranks/test_bytes.py::test_bytes_in_mixed_precision": (1, 5, 7, 11),
    "ranks/test_data.py::test_a_stream_is_read_once_by_all_ranks_together": (1, 2, 3),
    "ranks/test_data.py::test_a_stream_that_shuffles_itself_is_assigned_once": (0, 3, 4, 5),
    "ranks/test_evaluation.py::test_the_same_float_at_any_world_size": (0, 3, 5, 6),
    "ranks/test_exact.py::test_decisions_follow": (0, 2),
    "ranks/test_exact_borrowed.py::test_one_hash": (0, 2, 5, 7),
    "ranks/test_exchange_count.py::test_one_exchange_per_step": (0, 3, 5, 6),
    "ranks/test_foreign_optimizers.py::test_whole_parameters_give_the_numbers_of_plain_pytorch": (1, 3, 4),
    "ranks/test_fp16_strategies.py::test_all_ranks_skip_together": (0, 2, 3, 6, 8),
    "ranks/test_gradient_exact.py::test_parameters_of_two_formats": (2, 3, 5),
    "ranks/test_guards.py::test_find_unused_parameters_is_exact": (1, 3, 5),
    "ranks/test_hooks.py::test_powersgd_goes_on_from_a_checkpoint_with_the_same_bits": (1,),
    "ranks/test_hooks.py::test_powersgd_trains_the_character_model_as_well": (),
    "ranks/test_hooks.py::test_the_word_arrives_exact": (0, 3, 5, 7),
    "ranks/test_hooks.py::test_what_is_not_finite_stays_so_everywhere": (0, 3, 4, 7),
    "ranks/test_hooks.py::test_with_and_without_powersgd_in_turn": (0,),
    "ranks/test_inner_gradients.py::test_a_gradient_penalty_is_that_of_plain_pytorch": (1, 3, 5, 6, 7),
    "ranks/test_meta.py::test_training_ends_with_the_same_parameters": (0, 2, 3),
    "ranks/test_optimizers_by_name.py::test_char_lm_learns_as_with_adamw": (),
    "ranks/test_optimizers_by_name.py::test_its_state_is_resharded": (2, 3),
    "ranks/test_optimizers_by_name.py::test_the_same_parameters_on_any_number_of_ranks": (1, 3, 8, 10),
    "ranks/test_own_schedulers.py::test_a_scheduler_does_what_it_does_in_plain_pytorch": (0, 3, 4, 7, 8),
    "ranks/test_own_updates.py::test_a_gan_is_what_it_is_in_plain_pytorch": (0, 1, 3, 10, 11),
    "ranks/test_parameter_hooks.py::test_hooks_change_gradients_as_in_plain_torch": (1, 4, 5, 7),
    "ranks/test_parameter_hooks.py::test_hooks_get_the_full_gradient_of_sharded_layers": (1, 2),
    "ranks/test_remat.py::test_with_every_strategy": (1, 3, 5),
    "ranks/test_resume.py::test_any_world_goes_on_from_any_other": (1, 3, 6, 8, 11, 12),
    "ranks/test_schedule.py::test_the_curve_is_the_same_at_any_world_size": (2, 3),
    "ranks/test_show.py::test_a_text_gathers_the_model_once_if_there_is_room": (1, 3),
    "ranks/test_storage.py::test_a_resumed_run_has_the_same_bits": (0, 2, 3),
    "ranks/test_storage.py::test_char_lm_learns_as_in_fp32": (),
    "ranks/test_storage.py::test_more_rounding_with_more_micro_batches": (),
    "ranks/test_storage.py::test_two_ranks_end_with_the_bits_of_one": (0, 3, 5, 6, 8),
    "ranks/test_strategies.py::test_blocks_that_share_a_weight_and_one_that_rests": (1, 2, 4, 7, 8),
    "ranks/test_strategies.py::test_every_strategy_ends_with_the_same_parameters": (0, 2, 4, 5, 6, 8, 10, 12, 14),
    "ranks/test_strategies.py::test_save_in_any_resume_in_any_other": (0, 3, 4, 7, 10, 12, 13, 15),
    "ranks/test_tensor.py::test_cut_layers_train_the_same_model": (1, 3, 5, 7),
    "ranks/test_tensor.py::test_every_number_is_written_once": (1,),
    "ranks/test_tensor.py::test_in_fewer_bits": (1,),
    "ranks/test_tensor.py::test_other_ways_of_clipping": (1,),
    "ranks/test_tensor.py::test_uneven_parts_come_back_from_a_checkpoint": (0, 1),
    "ranks/test_collective_check.py::test_what_one_rank_leaves_out_is_named_by_all": (0, 4, 8),
    "ranks/test_zoo.py::test_it_ends_where_plain_pytorch_ends": (3, 4, 5, 7, 8, 10),
}
