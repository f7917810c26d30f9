"""Bugs sown into the real kernels, each of which some schedule must notice: the test of the kernel tests."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from cuflash import problem, source, tuning
from cuflash.backends import described_device
from cuflash.schedules import order
from cuflash.variant import Variant
from tests.cases import Case
from tests.emulator import Mutant, examine, kernels
from tests.tolerance import Expectation

FORWARD = tuning.ForwardTile(block_q=32, block_k=16, warps=2, stages=2, blocks_per_sm=1)
BACKWARD = tuning.BackwardTile(block_q=32, block_k=32, warps=2, query_warps=1, stages=2, dout_stages=2, blocks_per_sm=1)
TILES = {
    "two stages": (FORWARD, BACKWARD),
    "one stage": (FORWARD._replace(stages=1), BACKWARD._replace(stages=1, dout_stages=1)),
    "two columns": (FORWARD._replace(block_k=32), BACKWARD._replace(warps=4, query_warps=2)),
    "late": (FORWARD, BACKWARD._replace(warps=4, query_warps=2, late=True)),
}
CASES = {
    # lengths end inside a block, the rest is NaN; the last key outweighs the others
    "padded": Case("padded", "float16", heads_k=1, causal="top_left", lengths=(45, 29), dlse=True, head_dim=24),
    "growing": Case("growing", "float16", heads_k=1, causal=True, values="dominant key late", scale=2.0, head_dim=24),
    "empty rows": Case("empty rows", "float16", heads_k=1, causal=True, seq_q=45, seq_k=33, dlse=True, head_dim=24),
    "wide values": Case("wide values", "float16", head_dim=8, head_dim_v=88),
    "pieces": Case("pieces", "float16", bias="bhqk", seq_k=72, head_dim=24),
    "summed": Case("summed", "float16", bias="1hq1", head_dim=24),
    "modified": Case("modified", "float16", softcap=1.0, mask="hqk", bias="b1qk", window=(20, 9), head_dim=24),
    # many blocks add to one tile of queries, and with a window others to each
    "turns": Case("turns", "float16", batch=(), heads_k=1, seq_q=100, seq_k=180, head_dim=24),
    "turns in float32": Case("turns in float32", "float32", batch=(), heads_k=1, seq_q=140, seq_k=300),
    "turns in float64": Case("turns in float64", "float64", batch=(), heads_k=1, seq_q=140, seq_k=300),
    "float64": Case("float64", "float64", heads_k=1, causal="top_left", lengths=(45, 29), dlse=True, head_dim=24),
    "turns in a window": Case("turns in a window", "float16", batch=(), heads_q=1, heads_k=1, seq_q=140, seq_k=140,
                              window=(40, 20), head_dim=24),
    "fixed point": Case("fixed point", "float16", heads_k=1, seq_q=70, seq_k=100, bias="b1q1", lengths=(100, 45), dlse=True,
                        head_dim=24),
    "turns of chunks": Case("turns of chunks", "float16", batch=(), heads_q=1, heads_k=1, seq_k=70, head_dim=160,
                            head_dim_v=120),
}  # fmt: skip
HOPPER = tuning.ForwardWgmmaTile(max_head_dim=256, block_q=128, block_k=32, stages=2, query_stages=2, continuous=True)
HOPPER_TILES = {
    "continuous": HOPPER,
    "two tiles": HOPPER._replace(continuous=False),
    "one tile": HOPPER._replace(continuous=False, query_stages=1),
    "fetched": HOPPER._replace(continuous=False, query_stages=1, out_panels=1),
    "in place": HOPPER._replace(block_q=192, continuous=False, stages=3, in_place=True),
}
HOPPER_CASES = {
    # three tiles of queries, the last of 14 rows; up to five blocks of keys, the last of which ends inside; NaN behind it
    "long": Case("long", "float16", heads_q=3, heads_k=1, seq_q=270, seq_k=150, window=(100, 0), lengths=(150, 37)),
    "late": Case("late", "float16", seq_q=141, seq_k=110, values="dominant key late", scale=2.0, lengths=(110, 70)),
    # two tiles of 192 queries, of which the first has a warpgroup with the first query and two without any
    "causal": Case("causal", "float16", heads_q=3, heads_k=1, seq_q=241, seq_k=241, causal=True),
    "steep": Case("steep", "float16", heads_q=3, heads_k=1, seq_q=700, seq_k=700, causal=True),
    "wide": Case("wide", "float16", seq_q=141, seq_k=70, head_dim=136, head_dim_v=88, window=(60, 0), lengths=(70, 40)),
}


@dataclass(frozen=True)
class Sown:
    """A mutant, the case that shows it, and the tile."""

    mutant: Mutant
    case: str = "padded"
    tile: str = "two stages"
    turns: bool = False  # blocks run at once and add to dq in turns, whose bits are compared

    def __str__(self) -> str:
        return f"{self.mutant.kernel}-{self.mutant.description}".replace(" ", "_")


def hopper(description: str, old: str, new: str, case: str = "long", tile: str = "continuous", count: int = 1):
    return Sown(Mutant("forward_wgmma", description, old, new, count), case, tile)


def sown(kernel: str, description: str, old: str, new: str, case: str = "padded", tile: str = "two stages", count=1):
    return Sown(Mutant(kernel, description, old, new, count), case, tile)


def sown_turn(kernel: str, description: str, old: str, new: str, case: str = "turns", tile: str = "two stages"):
    return Sown(Mutant(kernel, description, old, new), case, tile, turns=True)


MUTANTS = [
    # ---- schedules: barriers and waits
    sown("forward_mma", "a block is read while it is overwritten",
         "__syncthreads();  // this block has arrived", "//"),
    sown("forward_mma", "a block is read before it has arrived",
         "cp_async_wait_group<0>();\n      __syncthreads();  // this block", "__syncthreads();  // this block"),
    sown("forward_mma", "keys are overwritten while they are read",
         "__syncthreads();  // keys are no longer read", "", tile="one stage"),
    sown("forward_mma", "values are overwritten while they are read",
         "__syncthreads();  // values are no longer read", "", tile="one stage"),
    sown("forward_mma", "the last values are not waited for",
         "else cp_async_wait_group<0>();", "else cp_async_wait_group<1>();", tile="one stage"),
    sown("forward_mma", "the last block of keys is forgotten",
         "tiles_of(recomputed(seen.end), Config::kBlockK)", "recomputed(seen.end) / Config::kBlockK"),
    sown("backward_mma", "a tile is read while it is overwritten",
         "__syncthreads();  // this tile has arrived", "//"),
    sown("backward_mma", "a tile is read before it has arrived",
         "cp_async_wait_group<0>();", "cp_async_wait_group<1>();"),
    sown("backward_mma", "dS is read before it is complete",
         "__syncthreads();  // P and dS are complete", ";"),
    sown("backward_mma", "dS of the step before is read before it is complete",
         "__syncthreads();  // this tile has arrived", "//", tile="late"),
    sown("backward_mma", "the last dS is read before it is complete",
         "__syncthreads();  // the last dS is complete", "", tile="late"),
    sown("backward_mma", "the other warp's half is read before it is complete",
         "bar_sync(1 + warp / 2, 64);", ";", tile="late"),
    sown("backward_mma", "pairs of warps share a barrier",
         "bar_sync(1 + warp / 2, 64);", "bar_sync(1, 64);", tile="late"),
    sown("backward_mma", "the tiles of dS do not alternate",
         "buffer = kLate ? step & 1 : 0;", "buffer = 0;", tile="late"),
    sown("backward_mma", "dQ a step late goes to the next tile",
         "before = tile_index;", "before = tile_index + 1;", tile="late"),
    sown("backward_mma", "the last dQ is forgotten",
         "if (kLate && steps > 0) {", "if (false) {", tile="late"),
    sown("backward_mma", "both warps multiply the same half",
         "other_query = kOwnHalf ? warp_query ^ kWarpQueries : 0;", "other_query = kOwnHalf ? warp_query : 0;", tile="late"),
    sown("backward_mma", "queries are overwritten while they are read",
         "__syncthreads();  // queries are no longer read", "", tile="one stage"),
    sown("backward_mma", "dO is overwritten while it is read",
         "__syncthreads();  // dO is no longer read", ";", tile="one stage and two columns"),
    sown("backward_mma", "the next tile replaces this one",
         "next_tile, stage ^ 1)", "next_tile, stage)"),
    sown("backward_mma", "the second head of a group is forgotten",
         "++next_head;", ""),
    sown("backward_mma", "dS is stored transposed",
         "store_pair(to.at(at.row(Fragment::slot(i)), at.column(i))", "store_pair(to.at(at.column(i), at.row(Fragment::slot(i)))"),
    sown("backward_mma", "P is multiplied in place of dS",
         "KeyFragment, Element, kLate>(dk, ds_tile", "KeyFragment, Element, kLate>(dk, p_tile", tile="two columns"),
    sown("backward_mma", "dk is not scaled",
         "warp_column), [&](int) { return p.scale; })", "warp_column), as_it_is)"),
    sown("backward_mma", "dK is stored while K is read",
         "__syncthreads();  // K and V are no longer read", "//"),
    sown("forward_mma", "the output is stored while values are read",
         "__syncthreads();  // nothing in shared memory is read any more", "//", case="wide values"),
    sown("backward_mma", "slopes are forgotten",
         "s[i] *= slopes[i];", "", case="modified"),
    sown("backward_convert_mma", "dq is not scaled",
         "[&](int) { return p.scale; }", "[&](int) { return 1.f; }"),
    sown("backward_delta", "dlse has the wrong sign",
         "row_statistics(lse, delta - dlse)", "row_statistics(lse, delta + dlse)"),
    sown("backward_delta", "sums of dq do not start at 0",
         "*reinterpret_cast<Chunk<Real>*>(sums + i) = Chunk<Real>{};", ";"),
    sown("backward_delta", "a lane finishes the rows of other passes",
         "if (pass == i) delta = sum;", "delta = sum;", case="wide values"),
    # ---- turns
    sown_turn("backward_mma", "nobody waits for a turn",
              "wait_for_turn(counter, turn);", ";"),
    sown_turn("backward_mma", "others do not wait for the thread that waits",
              "meet();  // it is this block's turn", ""),
    sown_turn("backward_mma", "the turn is passed before all have added",
              "meet();  // all have added", "", tile="two columns"),
    sown_turn("backward_mma", "the turn is not passed",
              "pass_turn(counter, turn + 1);", ";"),
    sown_turn("backward_mma", "the turn goes to the tile before",
              "pass_turn(counter, turn + 1);", "pass_turn(counter, turn - 1);"),
    sown_turn("backward_mma", "a block waits for a later one",
              "in_turn(static_cast<u32*>(p.turns) + 1 + sum, tile, add)", "in_turn(static_cast<u32*>(p.turns) + 1 + sum, key_tiles - 1 - tile, add)"),
    sown_turn("backward_mma", "blocks are taken to start in the grid's order",
              "index = int(start_number(static_cast<u32*>(p.turns), shared_memory));", ";"),
    sown_turn("backward_mma", "the number of the block is read before it is written",
              "atomicAdd(started, 1u); __syncthreads();", "atomicAdd(started, 1u);"),
    sown_turn("backward_mma", "chunks share a counter",
              "p.turns) + 1 + sum,", "p.turns) + 1 + tile_index,", case="turns of chunks"),
    sown_turn("backward_simt", "heads share counters",
              "1 + line / Config::kBlockQ", "1 + corner.q / Config::kBlockQ", case="turns in float32"),
    sown_turn("backward_simt", "every block is the first",
              "Config::kBlockQ, tile, add)", "Config::kBlockQ, 0, add)", case="turns in float32"),
    sown_turn("backward_delta", "every turn starts with the first tile of keys",
              "* Config::kTurns + i] = first;", "* Config::kTurns + i] = 0;", case="turns in a window"),
    sown_turn("backward_delta", "a tile that ends where a tile of queries begins is waited for",
              ".end > query_tile", ".end >= query_tile", case="turns in a window"),
    sown_turn("backward_delta", "blocks are counted from where the memory stood",
              "if (first_line == 0 && lane == 0) *static_cast<u32*>(p.turns) = 0;", ""),
    # ---- sums in fixed point
    sown_turn("backward_mma", "terms are rounded where a sum is below 0",
              "atomicAdd(&digits[i], u64(digit[i]));", "atomicAdd(&digits[i], u64(i64(digits[i]) < 0 ? digit[i] & ~i64(0xfff) : digit[i]));",
              case="fixed point"),
    sown_turn("backward_mma", "digits borrow from none",
              "digit[1] -= 1;", "", case="fixed point"),
    sown_turn("backward_mma", "every entry has the first one's unit",
              "axes.batch ? p.batch_size : place.entry(p)", "axes.batch ? p.batch_size : 0", case="fixed point"),
    sown_turn("backward_sums", "sums below 0 are read as if they were not",
              "Real(is_negative ? -sum : sum)", "Real(sum)", case="fixed point"),
    sown_turn("backward_bounds", "bounds are those of the last row",
              "if (x > to) atomicMax(&to, x);", "to = x;", case="fixed point"),
    # ---- the two halves of a block
    sown("backward_f64", "queries are read before they arrive",
         "wait_for_copies(); bar_sync(kFirstHalf", "bar_sync(kFirstHalf", case="float64"),
    sown("backward_f64", "the first half's warps do not wait for each other",
         "bar_sync(kFirstHalf, kHalfThreads);", "", case="float64"),
    sown("backward_f64", "dO is read before it arrives",
         "wait_for_copies(); bar_sync(kSecondHalf, kHalfThreads);", "bar_sync(kSecondHalf, kHalfThreads);", case="float64"),
    sown("backward_f64", "dP takes the place of a dS that is read",
         "bar_sync(kSecondHalf, kHalfThreads);  // dO", "//", case="float64"),
    *(
        sown("backward_f64", f"{what} is not waited for", f"bar_sync({barrier},", f"bar_arrive({barrier},", case="float64")
        for what, barrier in (("P", "kPWritten"), ("dP", "kDpWritten"), ("dS", "kDsWritten"))
    ),
    sown("backward_f64", "the last dQ is forgotten",
         "if (before >= 0) {", "if (before >= 0 && steps > 0) {", case="float64"),
    sown("backward_f64", "a warp's dS is not waited for",
         "__syncwarp();  // this warp's dS is complete", "", case="float64"),
    sown("backward_f64", "weights of hidden keys are not 0",
         "high = is_zero ?", "high = false ?", case="float64"),
    sown("backward_f64", "a root stands for its neighbour",
         "root, n & 31)", "root, n + 1 & 31)", case="float64"),
    sown("backward_convert_simt", "sums of a block of 8 are read row by row",
         "Config::kInBlocks ? ", "false ? ", case="float64"),
    sown_turn("backward_f64", "the turn is that of this step's tile",
              "+ 1 + before, tile", "+ 1 + number_of(head, query_tile), tile", case="turns in float64"),
    # ---- attention
    sown("forward_mma", "the accumulator keeps its old base",
         "o[i] *= alpha[Accumulator::slot(i)]", "", case="growing"),
    sown("forward_mma", "the sum keeps its old base",
         "l[slot] *= alpha[slot];", "", case="growing", count=2),
    sown("forward_mma", "probabilities may outgrow their type",
         "3.8 : 6)", "3.8 : 80)", case="growing"),
    sown("forward_mma", "an unseen row changes its base",
         "largest[slot] == -infinity<Real>() ? Real(1) : exp2_of", "exp2_of", case="empty rows"),
    sown("forward_mma", "lse forgets the scale",
         "fma_of(m[slot], p.softmax_scale * kLog2", "fma_of(m[slot], kLog2"),
    sown("forward_mma", "the diagonal is hidden",
         "q + place.diagonal(p.causal_diagonal) + 1)", "q + place.diagonal(p.causal_diagonal))"),
    sown("forward_mma", "a window is a key too wide",
         "at + p.window_last + 1)", "at + p.window_last + 2)", case="modified"),
    sown("forward_mma", "every tile passes for open",
         "if (queries.end > place.seq_q(p)) return false;", "return true;"),
    sown("backward_mma", "a query too few sees a key",
         "k - place.diagonal(p.causal_diagonal))", "k - place.diagonal(p.causal_diagonal) + 1)"),
    sown("backward_mma", "delta is ignored",
         "return probability * (dp - delta);", "return probability * dp;"),
    sown("backward_mma", "gradients of the bias are transposed",
         "element_at<OperandSum>(view, offset, q, k);", "element_at<OperandSum>(view, offset, k, q);", case="modified"),
    sown("backward_mma", "lanes are left out of the sums of a bias",
         "return x + __shfl_xor_sync(0xffffffffu, x, 16);", "return x;", case="summed"),
    sown("forward_mma", "pieces of a bias's rows are not shared out",
         "words[i] = upper ? other : words[i];", "", case="pieces", tile="two columns"),
    sown("forward_mma", "scores with a bias are not hidden",
         "s[i] = -infinity<Real>();", "", case="modified"),
    # ---- hardware
    sown("forward_mma", "keys beyond the length are copied",
         "at >= valid.begin && at < valid.end ? present : 0", "present"),
    sown("forward_mma", "columns beyond the head are copied",
         "min(max(columns - column, 0), kChunk)", "kChunk"),
    sown("forward_mma", "the halves of B are exchanged",
         ": lane / 16 * 8 + lane % 8; column = kRowsFirst ? lane / 16 * 8 : lane / 8 % 2 * 8;", ": lane % 16; column = lane / 16 * 8;"),
    sown("backward_mma", "the halves of A are exchanged",
         "row = kRowsFirst ? lane % 16 : lane / 16 * 8 + lane % 8; column = kRowsFirst ? lane / 16 * 8 :", "row = lane / 16 * 8 + lane % 8; column ="),
    sown("forward_mma", "rows are mistaken in the reduction",
         "return max_of(x, __shfl_xor_sync(0xffffffffu, x, 2));", "return max_of(x, __shfl_xor_sync(0xffffffffu, x, 4));", case="growing"),
]  # fmt: skip
# Of Hopper the emulator cannot show: pins, which bind the compiler alone; a missing fence.mbarrier_init, since barriers exist
# at once; the order of ordinary stores and an arrival of the same thread.
MUTANTS += [
    # ---- what is used before it is there
    hopper("the first keys of a tile are not waited for",
           "skip_keys(work); k_at.wait_full(shared.keys); block", "skip_keys(work); block"),
    hopper("keys are not waited for",
           "clean_values(work, block.number); k_at.wait_full(shared.keys);", "clean_values(work, block.number);"),
    hopper("blocks are counted from the wrong end", "number = work.last;", "number = work.first + 1;"),
    hopper("values are not waited for",
           "v_at.wait_full(shared.values); wgmma_fence(); issue_output(); release_stored();",
           "wgmma_fence(); issue_output(); release_stored();", case="late"),
    hopper("the last values are not waited for",
           "v_at.wait_full(shared.values); wgmma_fence(); issue_output(); wgmma_wait_group<1>(); pin(s); if",
           "wgmma_fence(); issue_output(); wgmma_wait_group<1>(); pin(s); if", case="late"),
    hopper("the last values are not waited for between tiles",
           "v_at.wait_full(shared.values); pin(probabilities);", "pin(probabilities);", case="late", tile="two tiles"),
    hopper("values are cleaned before they arrive",
           "return; v_at.wait_full(shared.values);", "return;"),
    hopper("queries are not waited for",
           "q_at.wait_full(shared.queries);", ""),
    hopper("a wait has the wrong parity",
           "mbarrier_wait(full(channel), phase);", "mbarrier_wait(full(channel), phase ^ 1);"),
    hopper("the parity stays",
           "phase ^= 1;", ""),
    hopper("scores are read before they are there",
           "wgmma_wait_group<1>(); pin(s); const bool moved", "pin(s); const bool moved"),
    hopper("the first scores are read before they are there",
           "issue_scores(); wgmma_wait_group<0>();", "issue_scores();", tile="continuous"),
    hopper("the last scores of a tile are read before they are there",
           "wgmma_wait_group<1>(); pin(s); if", "pin(s); if"),
    hopper("the output is rescaled while it is made",
           "wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); probabilities.pack<Element>(s); if (moved) Softmax::rescale<OutFragment>(o, alpha);",
           "if (moved) Softmax::rescale<OutFragment>(o, alpha); wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); probabilities.pack<Element>(s);", case="late"),
    hopper("probabilities are replaced while they are multiplied",
           "wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); probabilities.pack<Element>(s);",
           "probabilities.pack<Element>(s); wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values();"),
    hopper("the output is stored while it is made",
           "wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); conclude(of_done, done, factors); store(done, factors);",
           "release_values(); conclude(of_done, done, factors); store(done, factors); wgmma_wait_group<0>();"),
    hopper("the output is stored while it is made between tiles",
           "wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); store(done, factors); q_at",
           "release_values(); store(done, factors); wgmma_wait_group<0>(); q_at", tile="two tiles"),
    hopper("registers are not handed to the products",
           "pin(probabilities); wgmma_fence(); issue_scores(); v_at", "pin(probabilities); issue_scores(); v_at"),
    hopper("the barriers are used before they exist",
           "__syncthreads(); const int group", "const int group"),
    # ---- what is given back or overwritten too early, or never
    hopper("keys are overwritten while they are read", "k_at.wait_empty(shared.keys);", ""),
    hopper("values are overwritten while they are read", "v_at.wait_empty(shared.values);", "", case="late"),
    hopper("queries are overwritten while they are read", "q_at.wait_empty(shared.queries);", ""),
    hopper("a slot is free the other way round", "phase ^ 1);", "phase);"),
    hopper("keys are given back before they are read",
           "} else { release_keys(); } k_at.advance();", "} k_at.advance(); release_keys();"),
    hopper("values are given back before they are read",
           "wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); probabilities",
           "release_values(); wgmma_wait_group<0>(); pin_output(); pin(probabilities); probabilities"),
    hopper("queries are given back before they are read",
           "tile = next_tile(); // the grid",
           "tile = next_tile(); release_queries(); // the grid"),
    hopper("queries are given back before the output has left their place",
           "if (!Config::kSeparateOut && !kStaysBehind) cp_async_bulk_wait_group_read<0>();", "", tile="one tile"),
    hopper("queries are given back before the output lies in their place",
           "softmax.finish(); if constexpr", "softmax.finish(); if (!Config::kSeparateOut) release_queries(); if constexpr", tile="one tile"),
    hopper("queries are never given back", "if (Config::kSeparateOut) release_queries();", ""),
    hopper("values are never given back",
           "release_values(); conclude(of_done, done, factors);", "v_at.advance(); conclude(of_done, done, factors);"),
    hopper("every thread gives keys back",
           "if (hands_back) k_at.release(shared.keys);", "k_at.release(shared.keys);"),
    hopper("one warpgroup gives keys back for all", "shared.keys.init(kReaders);", "shared.keys.init(kReaders / kGroups);"),
    hopper("one warpgroup gives queries back for all", "Config::kSeparateOut ? kReaders : kGroups", "Config::kSeparateOut ? kReaders / kGroups : 1"),
    # ---- the producer
    hopper("a tile has no number", "shared.tiles[place_of(q_at)] = tile;", ""),
    hopper("the end is not told", "!tile.exists()) { mbarrier_arrive(full); }", "!tile.exists()) { ; }"),
    hopper("the last values of a tile are not loaded",
           "if (!kFetches) load_v(now, last); } else", "} else"),
    hopper("values are those of the block of keys", "load_v(now, before);", "load_v(now, block);"),
    hopper("half of a tile is announced", "expect_tx(barrier, Tile::kBytes)", "expect_tx(barrier, Tile::kBytes / 2)"),
    hopper("every head has its own keys",
           "{0, at.row, tile.head_k, at.batch}", "{0, at.row, tile.head, at.batch}"),
    hopper("the producer keeps its registers", "setmaxnreg_dec<Config::kProducerRegisters>();", ""),
    # ---- tiles
    hopper("a tile is passed over", ": index) + int(gridDim.x);", ": index) + int(gridDim.x) + 1;"),
    hopper("the last block of keys is forgotten",
           "tiles_of(seen.end, Config::kBlockK))};", "seen.end / Config::kBlockK)};"),
    hopper("the first block of keys is forgotten",
           "const int first = seen.begin / Config::kBlockK;", "const int first = tiles_of(seen.begin, Config::kBlockK);"),
    hopper("the last heads pass for a whole section",
           "min(section, heads - first)", "section"),
    hopper("the output of a tile begins with that of the one before", "clear(o);", ""),
    hopper("sums of a tile begin with those of the one before", "softmax = Softmax();", ""),
    hopper("scores are those of the tile before", "q_at.advance(); tile = next_tile(); if (tile >= 0) {", "tile = next_tile(); if (tile >= 0) {"),
    hopper("the positions are those of the tile before",
           "tile = next_tile(); if (tile >= 0) { work = Work(p, shared.tiles[tile], group);", "tile = next_tile(); if (tile >= 0) {"),
    hopper("a tile is asked about when another has taken its place",
           "int(at.phase) * kTileSlots", "0"),
    # ---- queries that warpgroups fetch, beside an output that leaves in parts
    hopper("fetched queries are not waited for",
           "if constexpr (kFetches) mbarrier_wait(", "if constexpr (false) mbarrier_wait(", tile="fetched"),
    hopper("fetched queries are waited for as if those before were theirs",
           "shared.fetched[group].full[0]), q_at.slot);", "shared.fetched[group].full[0]), q_at.slot ^ 1);", tile="fetched"),
    hopper("all warpgroups fetch the queries of the first",
           "const int own = group * kWarpgroupRows, row = of.row + own;", "const int own = group * kWarpgroupRows, row = of.row;", tile="fetched"),
    hopper("queries are fetched into the place of the first warpgroup's",
           "to.address() + panel * Tile::kPanelBytes + row * kPanelRowBytes;", "to.address() + panel * Tile::kPanelBytes;", tile="fetched"),
    hopper("a part of the output takes the place of one that leaves",
           "if (elected) cp_async_bulk_wait_group_read<0>();", "", case="wide", tile="fetched"),
    hopper("all parts of the output are the first", "scaled(o[begin + i],", "scaled(o[i],", case="wide", tile="fetched"),
    hopper("all parts of the output leave for the first columns", "{2 * begin, at.row", "{0, at.row", case="wide", tile="fetched"),
    hopper("a part of the output is stored while it is made",
           "wgmma_wait_group<0>(); pin_output(); pin(probabilities); release_values(); store(done, factors); if (tile >= 0) {",
           "release_values(); store(done, factors); wgmma_wait_group<0>(); if (tile >= 0) {", tile="fetched"),
    # ---- an output that leaves out of the place of its queries
    hopper("queries are given back before the output has left their place, a step later",
           "cp_async_bulk_wait_group_read<0>(); q_at.previous().release", "q_at.previous().release", tile="in place"),
    hopper("queries whose output has left are never given back", "owes = true;", ";", tile="in place"),
    hopper("the queries at hand are given back for those before",
           "q_at.previous().release(shared.queries);", "q_at.release(shared.queries);", tile="in place"),
    hopper("the output takes the place of other queries", "shared.out(q_at.slot)", "shared.out(q_at.slot ^ 1)", tile="in place"),
    hopper("the next queries are waited for before blocks that are passed over",
           "kFree = kStaysBehind ? Config::kStages + 2 : 3", "kFree = 3", case="steep", tile="in place"),
    # ---- tiles that count from the last query
    hopper("rows before the first query are stored",
           "done.row + first > -kWarpgroupRows", "true", case="causal", tile="in place"),
    hopper("sums of rows before the first query are stored",
           "u32(r) < u32(rows.end)", "r < rows.end", case="causal", tile="in place"),
    hopper("tiles begin where warpgroups do not",
           "tiles_of(rows, kWarpgroupRows) * kWarpgroupRows -", "rows -", case="causal", tile="in place"),
    hopper("a key of eight is hidden", "min(inside % 8, 2)", "min(inside % 8, 1)", case="causal", tile="in place"),
    hopper("short tiles that come last are the long ones", "tile = early + rest / heads;", "tile = rest / heads;", case="causal", tile="in place"),
    hopper("short tiles that come last are forgotten", "if (rest < 0) {", "if (true) {", case="causal", tile="in place"),
    # ---- blocks that only other warpgroups see
    hopper("a block too many is skipped",
           "seen = tiles_of(keys_seen_by_any(p, place, rows).end, Config::kBlockK)", "seen = keys_seen_by_any(p, place, rows).end / Config::kBlockK"),
    hopper("skipped keys are not waited for",
           "k_at.wait_full(shared.keys); if (kGuesses) __syncwarp();", "if (kGuesses) __syncwarp();"),
    hopper("skipped keys are kept", "release_keys(); k_at.advance(); bias", "k_at.advance(); bias"),
    hopper("skipped values are kept",
           "bar_sync(kGroupBarrier + group, kWarpgroupThreads); release_values(); } };", "bar_sync(kGroupBarrier + group, kWarpgroupThreads); v_at.advance(); } };"),
    # ---- barriers of warpgroups
    hopper("values are multiplied before all have cleaned them",
           "bar_sync(kAllBarrier, kGroups * kWarpgroupThreads);", ""),
    hopper("cleaned values are not told to the products",
           "fence_proxy_async(); bar_sync(kAllBarrier", "bar_sync(kAllBarrier"),
    hopper("values that nobody sees are not cleaned",
           "int block) { if constexpr (Visibility::kNarrows) {", "int block) { if constexpr (false) {"),
    hopper("a row too few is cleaned",
           "row >= valid.begin && row < valid.end", "row >= valid.begin && row <= valid.end"),
    hopper("only the first panel of values is cleaned",
           "tile.address() + panel * Tile::kPanelBytes + row * kPanelRowBytes + chunk", "tile.address() + row * kPanelRowBytes + chunk", case="wide", tile="one tile"),
    hopper("the output is overwritten while it is stored",
           "if (elected) cp_async_bulk_wait_group_read<0>();", ""),
    hopper("others overwrite the output while it is stored",
           "if (elected) cp_async_bulk_wait_group_read<0>(); bar_sync(kGroupBarrier + group, kWarpgroupThreads);", "if (elected) cp_async_bulk_wait_group_read<0>();"),
    hopper("the output is stored before all have written it",
           "fence_proxy_async(); bar_sync(kGroupBarrier + group, kWarpgroupThreads);", "fence_proxy_async();"),
    hopper("the output is not told to the copies",
           "fence_proxy_async(); bar_sync(kGroupBarrier", "bar_sync(kGroupBarrier"),
    hopper("the block ends before its output is read",
           "if (elected) cp_async_bulk_wait_group<0>();", ""),
    # ---- softmax and output
    hopper("the accumulator keeps its old base",
           "if (moved) Softmax::rescale<OutFragment>(o, alpha);", "", case="late"),
    hopper("sums are those of a thread's columns", "softmax.finish();", ""),
    hopper("rows of a thread share their sum",
           "factors[slot] = softmax.inverse(slot)", "factors[slot] = softmax.inverse(0)"),
    hopper("all warpgroups have the first one's rows",
           "return group * kWarpgroupRows + recomputed(threadIdx.x)", "return recomputed(threadIdx.x)"),
    hopper("output rows are those of the first warpgroup",
           "described_query(p, done.row + first, done", "described_query(p, done.row, done"),
    hopper("every block passes for open",
           "return block >= open.begin && block < open.end;", "return true;"),
    # ---- hardware
    hopper("scores are added to what was there", "along_rows<TileB>(i))), i != 0)", "along_rows<TileB>(i))), 1)"),
    hopper("a step of the contraction is half as long",
           "step % kSteps * (kStepDepth * 2 >> 4)", "step % kSteps * (kStepDepth >> 4)", case="wide", tile="one tile"),
    hopper("the contraction stays in the first panel",
           "step / kSteps * (Tile::kPanelBytes >> 4)", "0", case="wide", tile="one tile"),
    hopper("a step down the columns is half as long",
           "step * (kStepDepth * kPanelRowBytes >> 4)", "step * (kStepDepth * kPanelRowBytes >> 5)"),
    hopper("panels of values lie on each other",
           "u64(panel_bytes >> 4) << 16", "u64(panel_bytes >> 5) << 16", case="wide", tile="one tile"),
    hopper("eight rows are four", "kEightRows = 8 * kPanelRowBytes", "kEightRows = 4 * kPanelRowBytes"),
    hopper("another swizzle", "kSwizzle128 = 1ull << 62", "kSwizzle128 = 2ull << 62"),
    hopper("every warpgroup has the first one's queries", "tile.address() + row * kPanelRowBytes, Tile", "tile.address(), Tile"),
    hopper("the output is not swizzled", "((place ^ (row & 7)) << 4)", "(place << 4)"),
    hopper("columns of the output are exchanged",
           "row + lane % 16, 2 * j + lane / 16 * 8", "row + lane / 2 % 16, 2 * j + lane % 2 * 8"),
    hopper("the second panel is loaded from the first columns",
           "&map, barrier, at, policy); at.column += Tile::kWidth;", "&map, barrier, at, policy);", case="wide", tile="one tile"),
    hopper("the second panel is stored to the first columns",
           "+ row * kPanelRowBytes, at); at.column += Tile::kWidth;", "+ row * kPanelRowBytes, at);", case="wide", tile="one tile"),
    hopper("probabilities are packed in another order",
           "packed<Element>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1])", "packed<Element>(x[8 * i + 2 * j + 1], x[8 * i + 2 * j])"),
]  # fmt: skip
TILES["one stage and two columns"] = (FORWARD, TILES["two columns"][1]._replace(stages=1, dout_stages=1))


@pytest.fixture
def force(monkeypatch):
    """Sets the only tile that each direction may choose."""

    def tile(name):
        if name in HOPPER_TILES:
            monkeypatch.setattr(tuning, "FORWARD_WGMMA", (HOPPER_TILES[name],))
            monkeypatch.setattr(order, "EVEN_SECTION", 4)  # of 6 heads
            if HOPPER_TILES[name].in_place:
                monkeypatch.setattr(order, "CACHE_BYTES", 1)  # few heads fit: short tiles come last
            return
        monkeypatch.setattr(tuning, "FORWARD_MMA", (TILES[name][0],))
        monkeypatch.setattr(tuning, "BACKWARD_MMA", (TILES[name][1],))

    return tile


class Trial:
    """One case, run with the text of one kernel replaced."""

    def __init__(self, case: Case, turns: bool = False) -> None:
        self.turns = {"deterministic": True, "residents": 3, "watch": self.compare_sums} if turns else {}
        self.sums: bytes | None = None
        made = case.make()
        if case.lengths:
            for name in ("k", "v"):
                for batch, length in enumerate(case.lengths):
                    made[name][batch, :, length:] = np.nan
        self.call = problem.describe(made["q"], made["k"], made["v"], **made["options"])
        self.dout, self.dlse = made["dout"], made["dlse"]
        self.expectation = Expectation(self.call, self.dout, self.dlse)
        self.out = self.expectation.plain["out"]
        self.lse = self.expectation.lse.astype(self.call.problem.accumulator)

    def variant(self, kernel: str) -> Variant:
        """The variant of that kernel which the case runs."""
        found = []

        def note(variant):
            found.append(variant)
            return source.build(variant)

        self.run(kernel, note, 0)
        return next(v for v in found if v.kernel == kernel)

    def run(self, kernel: str, text, seed: int) -> None:
        """Run the direction that has the kernel; the backward is given the reference's output and lse."""
        if kernel == "forward_wgmma":
            device = replace(described_device(90), multiprocessors=2)
            self.expectation.check_forward(*kernels.forward(self.call, device, seed, text=text, requested="wgmma"))
            return
        if kernel.startswith("forward"):
            self.expectation.check_forward(*kernels.forward(self.call, 80, seed, text=text))
            return
        given = (self.call, self.out, self.lse, self.dout, self.dlse)
        self.expectation.check_backward(kernels.backward(*given, 80, seed, text=text, **self.turns))

    def compare_sums(self, arrays) -> None:
        """The sums have the bits that they had the first time, which is without a bug."""
        sums = b"".join(arrays[name].tobytes() for name in ("dq_sum", "dbias") if name in arrays)
        self.sums = self.sums or sums
        assert sums == self.sums, "dq or dbias was summed in another order"


def spelled(words: str, text: str) -> str:
    """Those words as the text breaks them into lines."""
    found = re.search(r"\s+".join(map(re.escape, words.split())), text)
    assert found, f"{words!r} is not in the kernel any more: what is the bug now?"
    return found[0]


@pytest.mark.parametrize("bug", MUTANTS, ids=str)
def test_mutant_is_noticed(bug, force):
    force(bug.tile)
    trial, kernel = Trial({**CASES, **HOPPER_CASES}[bug.case], bug.turns), bug.mutant.kernel
    variant = trial.variant(kernel)  # and the control: the kernel without the bug passes

    def run(text, seed):
        trial.run(kernel, lambda v: text if v == variant else source.build(v), seed)

    text = source.build(variant)
    mutant = replace(bug.mutant, old=spelled(bug.mutant.old, text))
    findings = examine(mutant, text, run, kernels.SEEDS)
    assert findings.noticed, findings


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_without_a_bug_pass(case, tile, force):
    force(tile)
    trial = Trial(CASES[case], turns=case.startswith(("turns", "fixed")))
    for kernel in ("forward", "backward"):
        for seed in kernels.SEEDS:
            trial.run(kernel, source.build, seed)


@pytest.mark.parametrize(
    ("case", "tile"), sorted({(bug.case, bug.tile) for bug in MUTANTS if bug.case in HOPPER_CASES})
)
def test_hopper_kernels_without_a_bug_pass(case, tile, force):
    force(tile)
    trial = Trial(HOPPER_CASES[case])
    for seed in kernels.SEEDS:
        trial.run("forward_wgmma", source.build, seed)


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 12
    assert len({str(bug) for bug in MUTANTS}) == len(MUTANTS), "a mutant is there twice"
