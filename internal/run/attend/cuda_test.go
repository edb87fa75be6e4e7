//go:build cuda

package attend

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/comm"
	commdevice "github.com/cprun/cprun/comm/device"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
)

// runGPU runs a case with one GPU per rank.
func runGPU(t *testing.T, m machine.Machine, path string, ranks int, s Spec) map[string][]float32 {
	t.Helper()
	s.In, s.Out, s.Device, s.Machine = path, filepath.Join(t.TempDir(), "out.safetensors"), "cuda", m
	hosts := comm.NewLocal(ranks, nil, comm.Options{})
	var g errgroup.Group
	for r := range ranks {
		g.Go(func() (err error) {
			defer func() {
				if err != nil {
					hosts[r].Abort(err)
				}
			}()
			c, err := Open(path)
			if err != nil {
				return err
			}
			defer c.Close()
			s := s
			if s.Algorithm == "hierarchical" {
				s.Inner = partition.Inner(ranks, ranks, c.Heads, c.KVHeads)
			}
			dtype, err := s.Element()
			if err != nil {
				return err
			}
			dev, err := device.CUDA(device.CUDAOptions{Ordinal: r, Backend: s.Backend, Compute: dtype, Machine: m,
				Packed: c.Masks.Docs != nil})
			if err != nil {
				return err
			}
			world, err := commdevice.New(context.Background(), hosts[r], dev.Stream.(*cuda.Stream),
				commdevice.Options{})
			if err != nil {
				return err
			}
			if _, err := c.Run(context.Background(), s, world, &dev); err != nil {
				return err
			}
			return errors.Join(world.Close(), dev.Close())
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return results(t, s.Out)
}

// The fixtures on every number of GPUs are compared with the float64 reference on the CPU. The bound is on the RMS
// error relative to the tensor's RMS: bfloat16 has 8 bits.
func TestFixturesOnGPUs(t *testing.T) {
	m, gpus, err := machine.Find()
	if err != nil {
		t.Fatal(err)
	}
	if len(gpus) == 0 {
		t.Fatal("no GPU is seen: the tag cuda tests GPUs")
	}
	paths, err := filepath.Glob("../../../attention/attentiontest/testdata/*.safetensors")
	if err != nil || len(paths) == 0 {
		t.Fatal("no fixtures", err)
	}
	masks, err := filepath.Glob("testdata/masks/*.safetensors")
	if err != nil || len(masks) == 0 {
		t.Fatal("no fixtures of masks", err)
	}
	paths = append(paths, masks...)
	for _, path := range paths {
		want, _ := run(t, path, 1, Spec{Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring",
			Backend: "reference"}, DType: "fp64"})
		for ranks := 1; ranks <= min(len(gpus), 4); ranks *= 2 {
			for _, s := range []Spec{
				{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "reference"}, DType: "fp32"},
				{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"}, DType: "fp32"},
				{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"}, DType: "bf16"},
				{Strategy: ring.Strategy{Layout: "striped", Algorithm: "allgather", Backend: "flash"}, DType: "bf16"},
				{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "fused"}, DType: "bf16"},
			} {
				if s.Backend == "fused" && takesTiles(t, path) {
					continue // rules fused-slices and fused-documents-mixed-bands
				}
				t.Run(fmt.Sprintf("%s/%d/%s-%s-%s", filepath.Base(path), ranks, s.Backend, s.Layout, s.DType),
					func(t *testing.T) {
						bound := map[string]float64{"fp32": 1e-4, "bf16": 2e-2}[s.DType]
						got := runGPU(t, m, path, ranks, s)
						for name, w := range want {
							d, err := near.Of(got[name], w, near.Infinities)
							if err != nil || !(d.Norm <= bound) {
								t.Errorf("%s is off by %+v, want a norm of at most %g: %v", name, d, bound, err)
							}
							t.Logf("%s is off by %.3g relative", name, d.Norm)
						}
					})
			}
		}
	}
}

// takesTiles reports whether the mask of a case needs kernels with tiles.
func takesTiles(t *testing.T, path string) bool {
	t.Helper()
	c, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.Masks.Slices != nil || c.Masks.DocsKV != nil
}

// TestScoresOnGPUs runs the cases with score options on the backends that support them.
func TestScoresOnGPUs(t *testing.T) {
	m, gpus, err := machine.Find()
	if err != nil {
		t.Fatal(err)
	}
	if len(gpus) == 0 {
		t.Fatal("no GPU is seen: the tag cuda tests GPUs")
	}
	for _, path := range scoreCases(t) {
		want := stored(t, path)
		specs := []Spec{
			{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "reference"}, DType: "fp32"},
			{Strategy: ring.Strategy{Layout: "striped", Algorithm: "allgather", Backend: "reference"},
				DType: "fp32"},
			{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ulysses", Backend: "reference"}, DType: "fp32"},
			{Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "hierarchical", Backend: "reference"},
				DType: "fp32"},
		}
		c, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if !c.Scores.Biased() && !c.Scores.MaxLogit {
			specs = append(specs, Spec{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"},
				DType: "fp32"})
		}
		c.Close()
		if strings.HasSuffix(path, "sink_wide.safetensors") { // with head dims that cuDNN supports
			specs = append(specs, Spec{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "fused"},
				DType: "bf16"}, Spec{Strategy: ring.Strategy{Layout: "zigzag", Algorithm: "ring", Backend: "flash"},
				DType: "bf16"})
		}
		for ranks := 1; ranks <= min(len(gpus), 4); ranks *= 2 {
			for _, s := range specs {
				t.Run(fmt.Sprintf("%s/%d/%s-%s-%s", filepath.Base(path), ranks, s.Backend, s.Layout, s.DType),
					func(t *testing.T) {
						got := runGPU(t, m, path, ranks, s)
						bound := map[string]float64{"fp32": 1e-4, "bf16": 2e-2}[s.DType]
						for name, w := range want {
							if d, err := near.Of(got[name], w, near.Infinities); err != nil || !(d.Norm <= bound) {
								t.Errorf("%s is off by %+v, want a norm of at most %g: %v", name, d, bound, err)
							}
						}
					})
			}
		}
	}
}
