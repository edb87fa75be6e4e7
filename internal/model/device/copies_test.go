package device

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cprun/cprun/tensor"
)

// A rig is a device's store and compute stream for a test.
type rig struct {
	store   Store
	compute tensor.Stream
	// set queues a fill of every byte of a view on compute.
	set func(v View, x byte)
	// hold queues work on compute that ends when open is called.
	hold func() (open func())
}

// hostRig returns the rig of a CPU.
func hostRig(t *testing.T) (rig, *Device) {
	s := tensor.NewHostStream("compute")
	d := CPU(s, "flash", tensor.F32)
	t.Cleanup(func() {
		d.Close() // a test with a failed stream checks the error
		s.Close()
	})
	return rig{
		store: d.Store, compute: s,
		set: func(v View, x byte) {
			s.Do("set", func() error {
				time.Sleep(50 * time.Microsecond) // so that a copy that does not wait comes too early
				fill(tensor.Data[uint8](v), x)
				return nil
			})
		},
		hold: func() func() {
			gate := make(chan struct{})
			s.Do("hold", func() error { <-gate; return nil })
			return func() { close(gate) }
		},
	}, &d
}

func fill(xs []uint8, x byte) {
	for i := range xs {
		xs[i] = x
	}
}

const rigBytes = 1 << 14

func (r *rig) vector(t *testing.T, host bool) View {
	t.Helper()
	d := Device{Store: r.store}
	v, err := d.Vector("vector", tensor.U8, rigBytes)
	if host {
		v, err = d.HostVector("vector", tensor.U8, rigBytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (r *rig) wait(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := r.compute.Sync(ctx); err != nil {
		t.Fatal(err)
	}
}

// all returns an error unless every byte of a host view is x.
func all(v View, x byte) error {
	for i, y := range tensor.Data[uint8](v) {
		if y != x {
			return fmt.Errorf("byte %d is %d, not %d", i, y, x)
		}
	}
	return nil
}

// copiesAreInOrder mixes compute with copies. Downloads return the same bytes as if one stream ran all work in order.
func copiesAreInOrder(t *testing.T, r rig) {
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var vs [3]View
		var now [3]byte
		for i := range vs {
			vs[i] = r.vector(t, false)
			r.set(vs[i], 0)
		}
		type down struct {
			host View
			want byte
		}
		var downs []down
		var ups []View
		for range 60 {
			i, x := rng.IntN(3), byte(rng.IntN(256))
			switch rng.IntN(3) {
			case 0:
				r.set(vs[i], x)
				now[i] = x
			case 1:
				host := r.vector(t, true)
				fill(tensor.Data[uint8](host), x)
				r.store.Upload(vs[i], host)
				now[i] = x
				ups = append(ups, host)
			case 2:
				host := r.vector(t, true)
				r.store.Download(host, vs[i])
				downs = append(downs, down{host, now[i]})
			}
		}
		r.wait(t)
		for k, d := range downs {
			if err := all(d.host, d.want); err != nil {
				t.Fatalf("seed %d, download %d: %v", seed, k, err)
			}
			r.store.FreeHost(d.host.Memory().(*tensor.Host))
		}
		for _, host := range ups {
			r.store.FreeHost(host.Memory().(*tensor.Host))
		}
	}
}

// prefetchRunsBeside blocks compute. A prefetch finishes meanwhile, and work queued after it waits for it.
func prefetchRunsBeside(t *testing.T, r rig, up tensor.Stream) {
	dst, host, back := r.vector(t, false), r.vector(t, true), r.vector(t, true)
	fill(tensor.Data[uint8](host), 7)
	open := r.hold()
	r.store.Prefetch(dst, host)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := up.Sync(ctx); err != nil {
		t.Errorf("a prefetch waits for compute: %v", err)
	}
	open()
	r.store.Download(back, dst)
	r.wait(t)
	if err := all(back, 7); err != nil {
		t.Error(err)
	}
}

func TestHostCopiesAreInOrder(t *testing.T) {
	r, d := hostRig(t)
	copiesAreInOrder(t, r)
	if w := d.Stream.(*tensor.HostStream).Waited(); w != 0 {
		t.Errorf("copies count as %v of waiting for other ranks", w)
	}
}

func TestHostPrefetchRunsBeside(t *testing.T) {
	r, d := hostRig(t)
	prefetchRunsBeside(t, r, d.Copies[0])
}

// If a stream fails, the others fail too, in both directions, so that no wait hangs.
func TestCopiesFailWithTheirDevice(t *testing.T) {
	cause := errors.New("broken")
	for name, fail := range map[string]func(d *Device){
		"compute":  func(d *Device) { d.Stream.(*tensor.HostStream).Fail(cause) },
		"upload":   func(d *Device) { d.Copies[0].(*tensor.HostStream).Fail(cause) },
		"download": func(d *Device) { d.Copies[1].(*tensor.HostStream).Fail(cause) },
	} {
		r, d := hostRig(t)
		dev, host := r.vector(t, false), r.vector(t, true)
		fail(d)
		r.store.Upload(dev, host)
		r.store.Download(host, dev)
		for _, s := range append([]tensor.Stream{d.Stream}, d.Copies...) {
			if err := s.Sync(t.Context()); !errors.Is(err, cause) && !(name == "download" && s == d.Copies[0]) {
				t.Errorf("%s fails: another stream says %v", name, err)
			}
		}
	}
}

func TestFurtherStream(t *testing.T) {
	r, d := hostRig(t)
	s, err := d.NewStream("offload")
	if err != nil {
		t.Fatal(err)
	}
	v := r.vector(t, true)
	r.set(v, 9)
	s.Wait(d.Stream.Record())
	if err := s.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := all(v, 9); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	defer func() {
		if recover() == nil {
			t.Error("the device left its stream open")
		}
	}()
	s.Record()
}
