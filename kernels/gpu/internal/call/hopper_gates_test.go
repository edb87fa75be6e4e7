//go:build cuda

package call

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// arrive makes two thirds of the keys and values arrive while the next kernel runs, one third each time it waits for
// them. Until then they are NaN. arrived copies the rest.
func (k hostHopper) arrive(keys, values View) (gates []attention.Gate, arrived func(), err error) {
	if k.late == nil {
		return nil, func() {}, nil
	}
	type gate struct {
		open, waiting *uint64
		come          func()
	}
	const count = 1<<40 + 3
	all := make([]gate, 2)
	for i := range all {
		m, err := k.alloc(16)
		if err != nil {
			return nil, nil, err
		}
		words := unsafe.Slice((*uint64)(m.Ptr()), 2)
		clear(words)
		n := keys.Len(tensor.Seq)
		rows := partition.Range{Lo: (i + 1) * n / 3, Hi: (i + 2) * n / 3}
		in := func(row int) bool { return rows.Lo <= row && row < rows.Hi }
		restoreK, restoreV := spoilRows(keys, in), spoilRows(values, in)
		all[i] = gate{&words[0], &words[1], sync.OnceFunc(func() { restoreK(); restoreV() })}
		at := uint64(uintptr(m.Ptr()))
		k.move(&at)
		gates = append(gates, attention.Gate{Rows: rows, Gate: tensor.Gate{Word: at, Count: count}})
	}
	k.during = func(over <-chan struct{}) {
		for left := slices.Clone(all); len(left) > 0; {
			select {
			case <-over:
				return
			case <-time.After(100 * time.Microsecond):
			}
			left = slices.DeleteFunc(left, func(g gate) bool {
				if atomic.LoadUint64(g.waiting) == 0 {
					return false
				}
				g.come()
				atomic.StoreUint64(g.open, count)
				*k.late++
				return true
			})
		}
	}
	return gates, func() {
		for i := len(all) - 1; i >= 0; i-- {
			all[i].come()
		}
		k.during = nil
	}, nil
}

// TestGatesOnHost runs kernels that begin before their keys have arrived.
func TestGatesOnHost(t *testing.T) {
	h := newHost(t)
	for _, dim := range []int{64, 128, 256, 512} {
		for _, deterministic := range []bool{false, true} {
			if testing.Short() && deterministic != (dim == 128) {
				continue
			}
			t.Run(fmt.Sprintf("%d, deterministic %t", dim, deterministic), func(t *testing.T) {
				h.t = t
				waits, seeds := 0, uint64(4)
				if testing.Short() {
					seeds = 1
				}
				rig := h.hopper(deterministic, hostHopper{late: &waits})
				for seed := range seeds {
					attentiontest.Check(t, rig, denseCase(seed, dim, dim), tensor.BF16)
				}
				if waits == 0 {
					t.Error("no kernel has waited")
				}
			})
		}
	}
}
