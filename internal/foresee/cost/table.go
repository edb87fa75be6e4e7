// Package cost predicts the times of the parts of a training step on a machine, from a table of measured times by
// size. `cprun bench calibrate` measures a table. The program contains tables of reference machines.
package cost

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
)

// Version numbers the format of the file. A reader accepts no other.
const Version = 1

// MaxBytes is more than a table's file has.
const MaxBytes = 4 << 20

// Table is the times of one machine.
type Table struct {
	Version int     `json:"version"`
	Machine Machine `json:"machine"`
	Program string  `json:"program"` // version of cprun that measured it
	Date    string  `json:"date"`    // RFC 3339
	Command string  `json:"command"` // that made it
	Source  string  `json:"source"`  // the origin of the figures, for a reader
	// CoreGFLOPs is the rate of a matrix product on one core of a CPU, for machines that have no table; 0: a GPU.
	CoreGFLOPs float64 `json:"core_gflops,omitempty"`
	Sets       []Set   `json:"sets"`
}

// Machine describes the machine of a table.
type Machine struct {
	Device   string            `json:"device"`         // "NVIDIA H200", or the model of a CPU
	Arch     int               `json:"arch,omitempty"` // of a GPU, 10 times its compute capability
	Cores    int               `json:"cores,omitempty"`
	Count    int               `json:"count,omitempty"` // GPUs
	Versions map[string]string `json:"versions,omitempty"`
}

// Set holds the figures measured with that many ranks of one machine at work at once. On a CPU they share the cores, so
// that a table has a set for each of several numbers.
type Set struct {
	Ranks     int         `json:"ranks"`
	Attention []Attention `json:"attention"`
	Products  []Product   `json:"products"`
	Passes    []Pass      `json:"passes"`
	Links     []Link      `json:"links"`
	// CallSeconds is the host's time to queue one call.
	CallSeconds float64 `json:"call_seconds"`
}

// KeepLess keeps the smaller of each figure of s and of another measurement of the same in the same order, since other
// load only slows.
func (s *Set) KeepLess(other *Set) {
	for i, b := range other.Attention[:min(len(s.Attention), len(other.Attention))] {
		a := &s.Attention[i]
		both := min(a.Seconds+a.Further, b.Seconds+b.Further)
		if a.Seconds = min(a.Seconds, b.Seconds); a.Further > 0 {
			a.Further = max(both-a.Seconds, a.Seconds/10)
		}
	}
	for i, b := range other.Products[:min(len(s.Products), len(other.Products))] {
		s.Products[i].Seconds = min(s.Products[i].Seconds, b.Seconds)
	}
	for i, b := range other.Passes[:min(len(s.Passes), len(other.Passes))] {
		s.Passes[i].Seconds = min(s.Passes[i].Seconds, b.Seconds)
	}
	for i, b := range other.Links[:min(len(s.Links), len(other.Links))] {
		s.Links[i].Seconds = min(s.Links[i].Seconds, b.Seconds)
	}
	s.CallSeconds = min(s.CallSeconds, other.CallSeconds)
}

// Masks of Attention.
const (
	Full   = "full"
	Causal = "causal" // as many queries as keys
	Band   = "band"   // causal, and a window of a quarter of the keys
	// Documents is Tiles causal tiles of one call, one behind another, with as many queries as keys each.
	Documents = "documents"
)

// Attention is one kernel call: a pass over one block of one tile.
type Attention struct {
	Backend  string `json:"backend"`
	DType    string `json:"dtype"`
	Backward bool   `json:"backward,omitempty"`
	Mask     string `json:"mask"`
	Dim      int    `json:"dim"`
	Heads    int    `json:"heads"`
	KVHeads  int    `json:"kv_heads"`
	Queries  int    `json:"queries"`
	Keys     int    `json:"keys"`
	Tiles    int    `json:"tiles,omitempty"` // of Documents; 0: one
	// Seconds of a pass with one such block; Further of each other block of the same pass, 0: as much.
	Seconds float64 `json:"seconds"`
	Further float64 `json:"further_seconds,omitempty"`
}

// Product is the Seconds of a matrix product of Rows tokens from In to Out elements of DType. Kind: linear, linear dx,
// linear dw, scaled linear, and with group before them.
type Product struct {
	Kind    string  `json:"kind"`
	DType   string  `json:"dtype"`
	Rows    int     `json:"rows"`
	In      int     `json:"in"`
	Out     int     `json:"out"`
	Seconds float64 `json:"seconds"`
}

// Pass is the Seconds of an operation Op on DType that is bound by memory. Bytes counts its necessary reads and writes.
// Upload and Download are copies from and to the host.
type Pass struct {
	Op      string  `json:"op"`
	DType   string  `json:"dtype"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
}

// Link is a transfer between neighbours: an exchange, or a collective over Ranks with Bytes in the whole buffer.
type Link struct {
	Pair      string  `json:"pair"`      // SameHost, OtherHost
	Transport string  `json:"transport"` // as the benchmark calls it
	Call      string  `json:"call"`      // exchange, all_reduce, reduce_scatter, all_gather
	Ranks     int     `json:"ranks"`
	Bytes     int64   `json:"bytes"`
	Seconds   float64 `json:"seconds"`
}

// Pairs of ranks.
const (
	SameHost  = "host"
	OtherHost = "hosts"
)

// Encode writes the table as JSON, a point a line.
func (t *Table) Encode(w io.Writer) error { return files.WriteJSON(w, " ", t) }

// Decode reads a table. It ignores unknown fields and returns an error for bad ones.
func Decode(text []byte) (*Table, error) {
	if err := files.Modest(text, MaxBytes/16); err != nil {
		return nil, fmt.Errorf("cost table: %w", err)
	}
	t := &Table{}
	if err := json.Unmarshal(text, t); err != nil {
		return nil, fmt.Errorf("cost table: %w", err)
	}
	if err := t.check(); err != nil {
		return nil, fmt.Errorf("cost table: %w", err)
	}
	return t, nil
}

func (t *Table) check() error {
	switch {
	case t.Version != Version:
		return fmt.Errorf("version %d, want %d; measure again with cprun bench calibrate", t.Version, Version)
	case t.Machine.Device == "":
		return errors.New("machine.device is missing")
	case !(t.CoreGFLOPs >= 0 && t.CoreGFLOPs < 1e6):
		return errors.New("core_gflops must be from 0 to below 1e6")
	case len(t.Sets) == 0:
		return errors.New("no sets")
	}
	for i := range t.Sets {
		if err := t.Sets[i].check(); err != nil {
			return fmt.Errorf("set %d: %w", i+1, err)
		}
	}
	return nil
}

func (s *Set) check() error {
	if s.Ranks < 1 || !counts(s.Ranks) {
		return fmt.Errorf("%d ranks", s.Ranks)
	}
	if !(s.CallSeconds >= 0 && s.CallSeconds < 1) {
		return errors.New("call_seconds must be from 0 to below 1")
	}
	for i, a := range s.Attention {
		if !time(a.Seconds) || a.Further != 0 && !time(a.Further) ||
			!counts(a.Dim, a.Heads, a.KVHeads, a.Queries, a.Keys) || a.KVHeads > a.Heads || !a.masked() {
			return fmt.Errorf("attention %d: %+v", i+1, a)
		}
	}
	for i, p := range s.Products {
		if !time(p.Seconds) || !counts(p.Rows, p.In, p.Out) {
			return fmt.Errorf("product %d: %+v", i+1, p)
		}
	}
	for i, p := range s.Passes {
		if !time(p.Seconds) || !counts(int(p.Bytes)) {
			return fmt.Errorf("pass %d: %+v", i+1, p)
		}
	}
	for i, l := range s.Links {
		if !time(l.Seconds) || !counts(int(l.Bytes), l.Ranks) || l.Pair != SameHost && l.Pair != OtherHost {
			return fmt.Errorf("link %d: %+v", i+1, l)
		}
	}
	return nil
}

// maxTiles limits the tiles of a measured call, since a model lays out all of them.
const maxTiles = 1 << 10

// masked reports whether the mask is one of a table's, and has the tiles that belong to it.
func (a *Attention) masked() bool {
	switch a.Mask {
	case Full, Causal, Band:
		return a.Tiles == 0
	case Documents:
		return a.Tiles > 0 && a.Tiles <= maxTiles
	}
	return false
}

func time(s float64) bool { return s > 0 && s < 3600 && !math.IsNaN(s) }

func counts(ns ...int) bool {
	return !slices.ContainsFunc(ns, func(n int) bool { return n < 1 || n > 1<<48 })
}

// keptUp is the shortest call, in seconds, that shows the rate of a GPU at its power limit. Shorter ones are faster
// than in a step, even after a warm-up.
const keptUp = 6e-3

// keep finds the highest rate of attention on a warm card: passes with two blocks are measured after passes with one.
func (m *Model) keep() {
	for _, a := range m.set.Attention {
		if both := a.Seconds + a.Further; a.Mask == Full && a.Further > 0 && both >= keptUp {
			x, flops := m.kernelOf(a.key()), 2*AttentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim)
			if rate := math.Log(flops / both); math.IsInf(x.most, 1) || rate > x.most {
				x.most = rate
			}
		}
	}
}

// ratio returns the time of a further block of a pass, over the time of its first. Both were measured together after
// one alone. The card was warmer then, and that difference is no cost of the second block.
func (m *Model) ratio(a *Attention) float64 {
	most := m.kernelOf(a.key()).most
	if math.IsInf(most, 1) {
		return a.Further / a.Seconds
	}
	kept := AttentionFLOPs(float64(a.Queries*a.Keys), a.Heads, a.Dim, a.Dim) / math.Exp(most)
	one := max(a.Seconds, kept)
	return max(a.Seconds+a.Further-one, kept) / one
}

func (a *Attention) key() attentionKey {
	return attentionKey{a.Backend, a.DType, a.Mask, a.Backward}
}
