// The arithmetic of the decode work map. Pure integers, so that a host compiler can build and test it too.
//
// A unit is UNIT tokens of one KV head of one row: what the warps of a block read in one turn. All units of a step stand
// in one line: row after row, within a row head after head, within a head tile after tile. Block c attends to the units
// [c * share, (c + 1) * share). The units of one (row, head) are a segment; a segment that lies in several blocks' shares
// has as many parts, and what each part gave is added up by the last of them to arrive.
#pragma once

#include "integers.cuh"

// One decoding row, as the plan kernel leaves it. `before`: units of the rows before it. [first, last): visible tokens, of which
// those from `fresh` on are written during this step: its own, and those of other rows of its sequence.
struct __attribute__((aligned(16))) RowWork {
    int before, tiles, token, table_row, first, last, index, fresh;
};

// What a block reads first. `share` 0: nothing to do.
struct __attribute__((aligned(16))) BlockWork {
    int share, units, rows, unused;
    RowWork row;  // the row that the block's first unit lies in
};

// Tiles of a row whose visible tokens are [first, last); a row without tokens has one, so that its output is written.
INTEGERS int row_tiles(int first, int last, int unit) {
    int tiles = ceil_div(last, unit) - first / unit;
    return tiles > 1 ? tiles : 1;
}

// Units a block: equal shares, and none below `least`.
INTEGERS int block_share(int units, int blocks, int least) {
    int share = ceil_div(units, blocks);
    return share > least ? share : least;
}

// A part of a segment, in one block's share.
struct Segment {
    int head;              // KV head (or piece of one) within the row
    int tile, tiles;       // tiles [tile, tile + tiles) of the row, counted from the one that holds `first`
    int first_block;       // block that holds the segment's first unit
    int parts;             // blocks that hold units of the segment
    int starts_in_middle;  // whether the segment's first unit is not the first of first_block's share
};

// The segment at unit `at` (which belongs to `row`), as far as it lies in a share that ends at `end`.
INTEGERS struct Segment segment_at(int at, int end, int before, int tiles, int share) {
    struct Segment s;
    int local = at - before;
    s.head = local / tiles;
    s.tile = local - s.head * tiles;
    int begin = before + s.head * tiles;  // units [begin, begin + tiles) are the whole segment
    int stop = begin + tiles < end ? begin + tiles : end;
    s.tiles = stop - at;
    s.first_block = begin / share;
    s.parts = (begin + tiles - 1) / share - s.first_block + 1;
    s.starts_in_middle = begin - s.first_block * share != 0;
    return s;
}

// Places of partial results: two a block. A segment that began in an earlier block is the first of this one and has
// place 0; one that begins here and goes on in the next is the last of this one and has place 1, unless it is also the first.
INTEGERS int part_place(int part, int first_block, int starts_in_middle) {
    return 2 * (first_block + part) + (part == 0 && starts_in_middle ? 1 : 0);
}
