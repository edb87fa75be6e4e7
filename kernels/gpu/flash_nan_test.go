//go:build cuda

package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/kernels/gpu/internal/call"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// TestFlashKeepsNaN checks that one NaN key of 768 reaches the results of all queries that see it, and the gradients of
// all keys that these queries see.
func TestFlashKeepsNaN(t *testing.T) {
	r := newCUDARig(t)
	const seq, bad = 768, 300
	all := r.flashVariants(t, [2]int{64, 64}, [2]int{128, 128}, [2]int{256, 256}, [2]int{512, 512})
	for _, dtype := range []tensor.DType{tensor.BF16, tensor.F16, tensor.F32} {
		for name, k := range map[string]attention.Kernel{
			"flash": all.fast, "flash, deterministic": all.ordered, "before Hopper": all.older,
			"before Hopper, deterministic": all.olderOrdered, "small shapes": all.small, "reference": r.newDeviceReference(),
		} {
			for _, dim := range []int{64, 128, 256, 512} {
				t.Run(fmt.Sprintf("%s, %v, head dim %d", name, dtype, dim), func(t *testing.T) {
					f := r.masked(seq, -1, [2]int{dim, dim})
					key := f.K.Slice(tensor.Seq, bad, bad+1)
					for i := range key.Len(tensor.Heads) * dim {
						tensor.Data[float32](key)[i] = float32(math.NaN())
					}
					got := r.within(t).attend(k, dtype, f)
					for what, x := range got.named() {
						width, first := len(x)/seq, bad // causal: queries since the bad key
						if what == "dk" || what == "dv" {
							first = 0 // those queries see all keys up to themselves
						}
						for i, y := range x {
							isNaN := y != y
							if row := i / width; isNaN != (row >= first) && (row >= first || row < bad/192*192) ||
								what == "lse" && math.IsInf(float64(y), -1) {
								t.Fatalf("row %d of %s is %g", row, what, y)
							}
						}
					}
				})
			}
		}
	}
}

// TestLostTurn checks that a block of keys that never gets its turn to add to dQ ends with an error that names it. The
// error breaks the GPU's context, so the test runs in another process.
func TestLostTurn(t *testing.T) {
	const mark = "the error names the block"
	if os.Getenv("CPRUN_TEST_CHILD") == "" {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestLostTurn$", "-test.v")
		cmd.Env = append(os.Environ(), "CPRUN_TEST_CHILD=1")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), mark) {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	r := newCUDARig(t)
	f := r.newFlash(true)
	if f.hopper == nil {
		fmt.Println(mark, "on Hopper")
		return
	}
	const seq = 512
	v := func(dtype tensor.DType, heads, dim int) View {
		return place(t, r.loader.Device(), dtype, [4]int{1, seq, heads, dim})
	}
	c := call.Flash{
		Tensors: call.Tensors{
			Q: v(tensor.BF16, 2, 128), K: v(tensor.BF16, 1, 128), V: v(tensor.BF16, 1, 128), DO: v(tensor.BF16, 2, 128),
			LSE: v(tensor.F32, 2, 1), Delta: v(tensor.F32, 2, 1),
			DQ: v(tensor.F32, 2, 128), DK: v(tensor.F32, 1, 128), DV: v(tensor.F32, 1, 128),
		},
		Softmax: attention.Softmax{Scale: 1}, Tiles: []partition.Tile{wholeTile(seq, partition.Full())},
	}
	l, ok := f.backwardOnHopper(&c, span(0, seq))
	if !ok {
		t.Fatal("the call does not go to the kernels for Hopper")
	}
	p := &l.Params
	check(t, f.uploadLists(l.Lists, &p.P.Tiles, &p.Order, &p.Needs, &p.Gates))
	check(t, f.encodeAll(l.Maps[:], &p.Q, &p.K, &p.V, &p.Dout, &p.DQ))
	words := slices.Repeat([]int32{0}, l.Progress+l.Next)
	words[l.Progress] = 1 // no block takes item 0, for which block 1 waits
	host := tensor.New(tensor.I32, len(words))
	copy(tensor.Data[int32](host), words)
	p.Progress = r.upload(host).Addr()
	p.Next, p.Polls = p.Progress+uint64(4*l.Progress), 1000
	p.Fault = uint64(uintptr(f.fault.Host().Ptr()))
	launch := cuda.Launch{Grid: cuda.Dim{X: l.Grid[0], Y: l.Grid[1], Z: l.Grid[2]}, Block: cuda.Dim{X: l.Threads},
		Shared: l.Shared}
	check(t, f.launch(l.Program, l.Kernel, launch, cuda.StructAligned(&cuda.Args{}, p, 64)))
	var e *cuda.Error // blocks 1, 2 and 3 wait at once, and any of them may give up first
	named := regexp.MustCompile("block of keys (1 .* block 0|2 .* block 1|3 .* block 2) to add to dq")
	if err := r.stream.Sync(context.Background()); !errors.As(err, &e) || !named.MatchString(err.Error()) {
		t.Fatalf("the error is %v", err)
	}
	fmt.Println(mark)
	os.Exit(0) // the context is broken, so cleanups would fail
}

// TestManyTiles checks that each of many queued calls gets its own list of tiles from host memory.
func TestManyTiles(t *testing.T) {
	r := newCUDARig(t)
	for _, deterministic := range []bool{false, true} {
		f := r.newFlash(deterministic)
		for n := range 6 {
			x := r.masked(4096, -1, usualDims)
			docs := slices.Repeat([]int{3 + n, 5}, 4096/(8+n))
			for rest := 4096 - len(docs)/2*(8+n); rest > 0; rest = 0 {
				docs = append(docs, rest)
			}
			var err error
			x.Mask, err = partition.NewMask(true, -1, 4096, 4096, docs)
			check(t, err)
			got, want := r.attend(f, tensor.BF16, x).named(), r.attend(r.newDeviceReference(), tensor.BF16, x).named()
			for _, what := range []string{"out", "dq", "dk", "dv"} {
				if d := distanceOf(got[what], want[what]); !(d < 0.02) {
					t.Errorf("%d documents, deterministic %t: %s is off by %g of the largest", len(docs), deterministic, what, d)
				}
			}
		}
	}
}

// distanceOf returns the largest difference, relative to the largest value.
func distanceOf(got, want []float32) float64 {
	worst, largest := 0.0, 0.0
	for i, w := range want {
		worst, largest = max(worst, math.Abs(float64(got[i]-w))), max(largest, math.Abs(float64(w)))
	}
	return worst / largest
}
