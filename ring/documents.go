package ring

import "github.com/cprun/cprun/partition"

// Packed documents scatter the rows that one rank needs of another: whole runs of documents of which
// the rank has nothing lie between them. So rows travel in several moves for a pair of ranks,
// those of partition.Index.NeedRanges, and what is sent is what is read. No gap travels to save a
// message: ranges end where a document ends or a mask does, and the document layout stores the
// chunks of a document one behind another, so there are at most as many ranges as documents that
// both ranks have part of, and rows between them would be other documents, whole.

// placed adds tiles on keys that were copied to another place: rows of an owner's block, which now
// stand one behind another from at on. All keys of a tile are visible, so they lie in one range.
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

// shifted is a tile with its keys d rows further on.
func shifted(t partition.Tile, d int) partition.Tile {
	t.K = partition.Range{Lo: t.K.Lo + d, Hi: t.K.Hi + d}
	t.Band = partition.Band{Lo: t.Band.Lo + d, Hi: t.Band.Hi + d}
	return t
}
