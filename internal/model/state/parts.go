package state

import (
	"slices"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/tensor"
)

// Group is Size ranks that reduce a bucket's gradients together, as member Rank of them sees it. The groups
// of a bucket are the world, cut into groups of one size; each holds parameters of its own.
type Group struct{ Rank, Size int }

// Groups returns the same group for each bucket of a layout.
func Groups(flat *model.FlatLayout, g Group) []Group {
	return slices.Repeat([]Group{g}, len(flat.Buckets))
}

// Group returns the group of a bucket.
func (s *State) Group(bucket int) Group { return s.groups[bucket] }

// owned returns the elements of all parts of this rank.
func (s *State) owned() int64 { return s.parts[len(s.parts)-1].Hi }

// Owned returns where this rank's part of each bucket lies in a buffer of parts.
func (s *State) Owned() []model.Bucket { return s.parts }

// Share returns the part of a bucket that this rank owns, in the flat space.
func (s *State) Share(bucket int) model.Bucket {
	lo, n := s.Flat.Buckets[bucket].Lo, s.parts[bucket].Size()
	r := int64(s.groups[bucket].Rank)
	return model.Bucket{Lo: lo + r*n, Hi: lo + (r+1)*n}
}

// Own returns that part of a flat buffer.
func (s *State) Own(v View, bucket int) View {
	r := s.Share(bucket)
	if int64(v.Size()) != s.Flat.Size() { // it holds parts
		r = s.parts[bucket]
	}
	return Part(v, int(r.Lo), int(r.Hi))
}

// Whole returns a bucket of a flat buffer that holds all.
func (s *State) Whole(v View, bucket int) View {
	b := s.Flat.Buckets[bucket]
	return Part(v, int(b.Lo), int(b.Hi))
}

// Held returns the part of a bucket in a flat buffer of the optimizer.
func (s *State) Held(v View, bucket int) View {
	if s.shard == ShardNone {
		return s.Whole(v, bucket)
	}
	return s.Own(v, bucket)
}

// HeldRange returns the place of Held in the flat space.
func (s *State) HeldRange(bucket int) model.Bucket {
	if s.shard == ShardNone {
		return s.Flat.Buckets[bucket]
	}
	return s.Share(bucket)
}

// Staged returns this rank's part of a bucket's staged gradients.
func (s *State) Staged(bucket int) View {
	n, r := int(s.parts[bucket].Size()), s.groups[bucket].Rank
	return Part(s.Staging[bucket], r*n, (r+1)*n)
}

// Sharded says whether ranks keep parts of the state alone.
func (s *State) Sharded() bool { return s.shard != ShardNone }

// Part returns the elements [lo, hi) of a vector.
func Part(v View, lo, hi int) View { return v.Slice(tensor.Dim, lo, hi) }
