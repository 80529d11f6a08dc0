"""The planted bugs: where, what text is replaced by what, and the test that must fail.

`old` must stand exactly once in the file. Whoever changes that place, or renames the test, adapts the mutant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted bug; `file` is below src/gnnlm."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    # -- what may be known: leakage, causality, windows ------------------------------------------------------------
    Mutant(
        "leakage rule: the reach of windows is left out",
        "retrieval/search.py",
        "return self.receptive_field + self.reach + self.carried",
        "return self.receptive_field + self.carried",
        "tests/retrieval/test_search.py::test_no_leaked_window_node_is_ever_retrieved",
    ),
    Mutant(
        "leakage rule: what layers carry on is left out",
        "retrieval/search.py",
        "return self.receptive_field + self.reach + self.carried",
        "return self.receptive_field + self.reach",
        "tests/retrieval/test_leakage.py",
    ),
    Mutant(
        "leakage rule: not across documents of a continuous text",
        "retrieval/search.py",
        "if places is not None:\n            here",
        "if False:\n            here",
        "tests/retrieval/test_search.py::test_a_continuous_text_leaks_across_documents",
    ),
    Mutant(
        "causality: a token attends to the one after it",
        "graph/batch.py",
        "behind_BTS >= 0",
        "behind_BTS >= -1",
        "tests/predict/test_open_book.py::test_causality",
    ),
    Mutant(
        "context: a token attends to one more before it",
        "graph/batch.py",
        "behind_BTS < context",
        "behind_BTS <= context",
        "tests/gnn/test_layer.py::test_matches_edge_lists",
    ),
    Mutant(
        "graph windows: they cross the end of a document",
        "graph/batch.py",
        "(positions_UW <= last_U[:, None])",
        "(positions_UW <= last_U[:, None] + 1)",
        "tests/graph/test_batch.py::test_windows_stay_inside_their_document",
    ),
    Mutant(
        "encoding windows: less context than was promised",
        "corpus/windows.py",
        "start = max(0, first - context) if first else 0",
        "start = max(0, first - context + 1) if first else 0",
        "tests/corpus/test_build.py::test_each_position_is_kept_once_with_enough_before_it",
    ),
    Mutant(
        "own past: rows that the window has not read whole",
        "predict/own_past.py",
        "max(0, offset - self.right)",
        "max(0, offset)",
        "tests/predict/test_own_past.py::test_rows_can_be_found_when_their_windows_have_been_read",
    ),
    Mutant(
        "own past: what the base model still sees",
        "predict/own_past.py",
        "min(window_start(offset, self.window, self.context), max",
        "min(offset, max",
        "tests/predict/test_own_past.py::test_it_is_what_loops_find",
    ),
    # -- search ------------------------------------------------------------------------------------------------------
    Mutant(
        "ties: equal similarities in the order of candidates",
        "retrieval/exact.py",
        "order_NC = positions_NC.masked_fill(positions_NC < 0, last).argsort(dim=1, stable=True)",
        "order_NC = torch.arange(positions_NC.shape[1], device=positions_NC.device).expand_as(positions_NC)",
        "tests/retrieval/test_search.py::test_batches_find_the_same_rows",
    ),
    Mutant(
        "filters: exact search ignores them",
        "retrieval/exact.py",
        "scores_nR.masked_fill_(~open_R, -math.inf)",
        "pass",
        "tests/retrieval/test_search.py::test_filters_leave_k_neighbours",
    ),
    Mutant(
        "filters: documents to exclude are not excluded",
        "datastore/filter.py",
        "return sorted(numbers - (set() if exclude is None else listed.matching(exclude)))",
        "return sorted(numbers)",
        "tests/datastore/test_store.py::test_filters_by_name_and_glob",
    ),
    Mutant(
        "removed documents: found in a segment that lost some",
        "retrieval/tombstones.py",
        "return index if live_P is None else TombstonedIndex(index, live_P, rows[number])",
        "return index",
        "tests/library/test_library.py::test_what_is_removed_is_found_by_nothing",
    ),
    Mutant(
        "removed documents: drafts follow their text",
        "datastore/store.py",
        "return self.tokens_P if self.live_P is None else self.tokens_P.masked_fill(~self.live_P, END)",
        "return self.tokens_P",
        "tests/library/test_library.py::test_drafts_do_not_follow_removed_text",
    ),
    Mutant(
        "segments: positions of the second count from its beginning",
        "retrieval/segmented.py",
        "near.positions + self.bases[number]",
        "near.positions",
        "tests/retrieval/test_segmented.py::test_exact_search_of_segments_is_exact_search",
    ),
    # -- predictions -------------------------------------------------------------------------------------------------
    Mutant(
        "kNN: the softmax is over all neighbours, not the k nearest",
        "predict/knn.py",
        "neighbour_weights(similarity_NK[:, : self.k], self.temperature)",
        "neighbour_weights(similarity_NK, self.temperature)",
        "tests/predict/test_gate.py::test_against_a_loop",
    ),
    Mutant(
        "mixing: the model's part is not scaled down",
        "predict/knn.py",
        "lm + torch.log1p(-weight)",
        "lm",
        "tests/predict/test_knn.py::test_against_dictionaries",
    ),
    Mutant(
        "mixing: the whole distribution does not sum to one",
        "predict/knn.py",
        "out_NV = lm_NV + torch.log1p(-weight_N1)",
        "out_NV = lm_NV.clone()",
        "tests/predict/test_open_book.py::test_predictions_sum_to_one",
    ),
    Mutant(
        "mixing: a first token has no weight of its own",
        "predict/knn.py",
        "evidence.read_N == 0",
        "evidence.read_N < 0",
        "tests/predict/test_gate.py::test_first_tokens_have_their_own_weight",
    ),
    Mutant(
        "gate: agreement counts the wrong token",
        "predict/gate.py",
        "tokens_NK == sure.token[:, None]",
        "tokens_NK == tokens_NK[:, :1]",
        "tests/predict/test_gate.py::test_against_a_loop",
    ),
    Mutant(
        "gate: features are not clamped",
        "predict/gate.py",
        ".clamp(-SPREAD, SPREAD)",
        "",
        "tests/predict/test_gate.py::test_against_a_loop",
    ),
    Mutant(
        "quantizer: decoding forgets the mean",
        "datastore/quantize.py",
        "@ self.rotation_DD + self.mean_D",
        "@ self.rotation_DD",
        "tests/datastore/test_quantize.py::test_decoding_is_faiss_decoding",
    ),
    Mutant(
        "quantizer: attention over codes does not turn the query",
        "datastore/quantize.py",
        "return queries @ self.quantizer.rotation_DD.T.to(queries.dtype)",
        "return queries",
        "tests/datastore/test_quantize.py::test_attention_over_codes_is_attention_over_decoded_vectors",
    ),
    Mutant(
        "cache: tables are made without the layer's norm",
        "predict/window_cache.py",
        "table = layer.pre_norm(states)",
        "table = states",
        "tests/predict/test_cache.py::test_single_precision_forms",
    ),
    Mutant(
        "attach: only the first row of the text can be found",
        "predict/attach.py",
        "rows.all()",
        "rows.all()[:1]",
        "tests/predict/test_attach.py::test_files_are_cited_by_name_and_place",
    ),
    Mutant(
        "attach: cached lines of another segment",
        "predict/overlay.py",
        "JoinedTable([*_parts(table), *(each[number] for each in lines)])",
        "JoinedTable([*_parts(table), *(each[0] for each in lines)])",
        "tests/predict/test_attach.py::test_predictions_are_those_of_a_run_with_the_documents_in_its_store",
    ),
    # -- writing -----------------------------------------------------------------------------------------------------
    Mutant(
        "drafts: accepted whatever the model chooses",
        "write/batch_loop.py",
        "if not same:\n                return place",
        "if False:\n                return place",
        "tests/write/test_writing.py::test_drafts_change_nothing_but_the_number_of_steps",
    ),
    Mutant(
        "sampling: the seed counts for nothing",
        "write/sampling.py",
        "key=[seed, sample]",
        "key=[0, sample]",
        "tests/write/test_writing.py::test_samples_differ_and_seeds_repeat",
    ),
    Mutant(
        "sampling: top_p keeps one token too few",
        "write/sampling.py",
        "before = ordered.cumsum(0) - ordered",
        "before = ordered.cumsum(0)",
        "tests/write/test_sampling.py::test_filters_are_those_of_transformers",
    ),
    Mutant(
        "shares: they are not of the token's probability",
        "write/next_token.py",
        "(parts.double() / math.exp(log_prob)).float()",
        "parts",
        "tests/write/test_writing.py::test_shares_are_exact_and_sum_to_one",
    ),
    Mutant(
        "sources: the smallest shares come first",
        "write/attribution.py",
        "voters.share.argsort(descending=True, stable=True)",
        "voters.share.argsort(stable=True)",
        "tests/write/test_writing.py::test_shares_are_exact_and_sum_to_one",
    ),
    Mutant(
        "sources: spans are a token too far",
        "write/attribution.py",
        "yield first, length, following - length, share",
        "yield first, length, following - length + 1, share",
        "tests/write/test_writing.py::test_sources_and_spans_quote_their_documents",
    ),
    Mutant(
        "token offsets: bytes are taken for characters",
        "lm/hf_tokenizer.py",
        "characters = np.append(byte_offsets(text), len(text))",
        "characters = np.arange(len(data) + 1)",
        "tests/lm/test_hf_tokenizer.py",
    ),
    # -- what is on the disk ----------------------------------------------------------------------------------------
    Mutant(
        "fsync: what is written is not synced",
        "artifact/disk.py",
        "os.fsync(file.fileno())",
        "pass",
        "tests/artifact/test_disk.py::test_a_replaced_file_is_synced_before_its_name_and_its_name_after",
    ),
    Mutant(
        "fsync: names are not synced",
        "artifact/disk.py",
        "os.fsync(number)",
        "pass",
        "tests/artifact/test_disk.py::test_the_name_of_a_new_folder_is_synced",
    ),
    Mutant(
        "rename order: a file takes its name before it is synced",
        "artifact/disk.py",
        "    write_file(beside, data)\n    rename(beside, path)\n",
        "    beside.write_bytes(data)\n    rename(beside, path)\n    sync_file(path)\n",
        "tests/artifact/test_disk.py::test_a_replaced_file_is_synced_before_its_name_and_its_name_after",
    ),
    Mutant(
        "checksums: blocks are not compared",
        "artifact/blocks.py",
        "if zlib.crc32(data) != self._crcs[number]:",
        "if False:",
        "tests/artifact/test_blocks.py::test_damage_is_seen_in_what_is_read_and_there_alone",
    ),
    Mutant(
        "resume: rows after the last commit stay",
        "artifact/array_writer.py",
        "disk.truncate(self._file, size)",
        "pass",
        "tests/test_artifact.py::test_resumed_build_has_the_same_bytes",
    ),
    Mutant(
        "resume: damage in what was committed is not seen",
        "artifact/draft.py",
        "if crc32_of(self.folder / name, size) != digest:",
        "if False:",
        "tests/test_artifact.py::test_a_journal_and_what_it_relies_on_are_checked",
    ),
    Mutant(
        "erase: manifests are not searched",
        "library/erase.py",
        "return file.name not in (MANIFEST, ERASED) and any(path in file.parents for path in doomed)",
        "return any(path in file.parents for path in doomed)",
        "tests/library/test_erase.py::test_manifests_that_stay_are_searched",
    ),
    Mutant(
        "erase: the text of what was erased stays",
        "library/erase.py",
        "_delete(doomed, now.number)\n",
        "_delete(doomed, now.number, but=TEXT)\n",
        "tests/library/test_erase.py::test_what_was_compacted_without_erasing_is_erased_later",
    ),
    Mutant(
        "fork: stages are kept whatever their inputs",
        "run/run.py",
        "if new.inputs(stage) == read_manifest(self.path(name)).inputs:",
        "if True:",
        "tests/test_end_to_end.py::test_a_quantized_run",
    ),
    Mutant(
        "staleness: a stage of stale parents is done",
        "run/run.py",
        'current = inputs is not None and all(known[parent] == "done" for parent in self.parents(stage))',
        "current = inputs is not None",
        "tests/test_run.py::test_a_changed_default_makes_the_network_stale",
    ),
    Mutant(
        "path traversal: a generation may name a folder outside",
        "generation/record.py",
        'if len(parts) < 3 or parts[0] != REFITTED or ".." in parts:',
        "if len(parts) < 3 or parts[0] != REFITTED:",
        "tests/generation/test_generation.py::test_a_record_names_nothing_outside_its_folder",
    ),
    # -- the server --------------------------------------------------------------------------------------------------
    Mutant(
        "HTTP auth: any key is accepted",
        "serve/limits.py",
        'return any(found) and scheme.lower() == "bearer"',
        'return bool(found) and scheme.lower() == "bearer"',
        "tests/serve/test_limits.py::test_keys",
    ),
    Mutant(
        "HTTP auth: no key is asked for",
        "serve/middleware.py",
        'scope["path"] not in OPEN',
        "False",
        "tests/serve/test_limits.py::test_keys",
    ),
    Mutant(
        "limits: a body may be of any size",
        "serve/middleware.py",
        "if len(body) > limits.max_body:",
        "if False:",
        "tests/serve/test_limits.py::test_large_bodies_are_refused_unread",
    ),
    Mutant(
        "host check: a page of another name may ask",
        "serve/middleware.py",
        "return ipaddress.ip_address(name).is_loopback\n    except ValueError:\n        return False",
        "return ipaddress.ip_address(name).is_loopback\n    except ValueError:\n        return True",
        "tests/serve/test_limits.py::test_other_names_of_this_machine_are_refused",
    ),
]
