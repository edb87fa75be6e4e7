package config

import (
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// Sharing describes the ranks and the attention that the rules for a strategy go by.
type Sharing struct {
	Device         string // cuda, or anything else for the CPU
	Documents      bool   // sequences are packed documents
	Ranks, PerHost int    // that share a sequence, and all ranks of a host
	Heads, KVHeads int
}

// Ruled returns the strategy with its open fields as the rules have them, which hold where no costs are known. The
// backend and when rows travel stay open.
func Ruled(s ring.Strategy, by Sharing) ring.Strategy {
	layout, algorithm := "zigzag", "ring"
	if by.Documents {
		layout = "document"
	}
	auto(&s.Layout, layout)
	if s.Layout == "document" && by.Device != "cuda" {
		algorithm = "allgather" // of documents a ring sends three times as much (docs/ring.md); not measured on GPUs
	}
	auto(&s.Algorithm, algorithm)
	if s.Algorithm == "hierarchical" && s.Inner == 0 && by.Ranks > 0 {
		s.Inner = partition.Inner(by.Ranks, by.PerHost, by.Heads, by.KVHeads)
	}
	return s
}

// auto fills a field that is open.
func auto(field *string, choice string) {
	if *field == "auto" || *field == "" {
		*field = choice
	}
}
