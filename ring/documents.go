package ring

import "github.com/cprun/cprun/partition"

// Packed documents scatter the rows that one rank needs of another: whole documents of third ranks lie between them.
// So rows travel in several moves for a pair of ranks, the ranges of partition.Index.NeedRanges, and no gap travels to
// save a message. Ranges end at the end of a document or mask, and the document layout stores the chunks of a document
// one after another. So a pair has at most one range for each document that both have part of.

// placed adds tiles on rows of an owner's block that were copied one after another to row at. All keys of a tile are
// visible, so they lie in one range.
func placed(to, tiles []partition.Tile, ranges []partition.Range, at int) []partition.Tile {
	for _, t := range tiles {
		here := at
		for _, r := range ranges {
			if r.Lo <= t.K.Lo && t.K.Hi <= r.Hi {
				to = append(to, shifted(t, here-r.Lo))
				break
			}
			here += r.Len()
		}
	}
	return to
}

// shifted returns a tile with its keys d rows later.
func shifted(t partition.Tile, d int) partition.Tile {
	t.K = partition.Range{Lo: t.K.Lo + d, Hi: t.K.Hi + d}
	t.Band = partition.Band{Lo: t.Band.Lo + d, Hi: t.Band.Hi + d}
	return t
}
