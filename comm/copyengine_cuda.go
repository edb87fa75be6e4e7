//go:build cuda

package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cprun/cprun/internal/cuda"
	"github.com/cprun/cprun/internal/tensor"
)

// newCopyEngine joins the ranks of host, all of this machine, by the copy engines of their
// devices. using is held by who queues work on compute, also by the caller of exchange. If it
// fails on one rank it fails on all. It takes 512 bytes of the device.
func newCopyEngine(ctx context.Context, host *Group, dev *cuda.Device, compute *cuda.Stream, using sync.Locker) (mover, error) {
	e, err := connectCopyEngine(ctx, copyConfig{
		host: host, dev: &cudaCopies{dev: dev}, compute: compute, using: using,
		limit: host.opts.Deadline, lanes: copyLanes, split: splitBytes, share: sharedFile{},
	})
	if err != nil {
		return nil, err
	}
	return e, nil
}

// CopyStreams are the streams of the copy engines, for traces; none where exchanges go over
// NCCL. They may be waited for while nothing is in flight.
func (d *DeviceGroup) CopyStreams() (streams []*cuda.Stream) {
	if e, ok := d.copies.(*copyEngine); ok {
		for _, lanes := range e.lanes {
			for _, l := range lanes {
				streams = append(streams, l.(*cudaLane).s)
			}
		}
	}
	return streams
}

// cudaCopies is the copyDevice of a GPU.
type cudaCopies struct {
	dev *cuda.Device

	page    unsafe.Pointer // the flags on the host, and
	flags   uint64         // on the device
	mu      sync.Mutex
	exports map[uint64]cuda.IPCHandle // guarded by mu; by the allocation's address
	imports map[cuda.IPCHandle]uint64 // used under the engine's lock, as is near
	near    map[uint64]bool           // allocations of this process that can be reached
}

// Pages are pinned whole: no word of somebody else's may lie in them.
var _ [0]struct{} = [pageWords * 8 % 4096]struct{}{}

func (c *cudaCopies) attach(flags []uint64) (err error) {
	c.exports, c.imports, c.near = map[uint64]cuda.IPCHandle{}, map[cuda.IPCHandle]uint64{}, map[uint64]bool{}
	if err := c.dev.MemOps(); err != nil {
		return err
	}
	page := unsafe.Pointer(unsafe.SliceData(flags))
	if c.flags, err = c.dev.Register(page, int64(len(flags)*8)); err != nil {
		return fmt.Errorf("the flags: %w", err)
	}
	c.page = page
	return nil
}

// detach gives back what attach and reach took.
func (c *cudaCopies) detach() error {
	var errs []error
	for _, addr := range c.imports {
		errs = append(errs, c.dev.CloseImport(addr))
	}
	if c.page != nil {
		errs = append(errs, c.dev.Unregister(c.page))
	}
	c.imports, c.page = nil, nil
	return errors.Join(errs...)
}

// flag is the device's address of a flag.
func (c *cudaCopies) flag(f *uint64) uint64 {
	return c.flags + uint64(uintptr(unsafe.Pointer(f))-uintptr(c.page))
}

func (c *cudaCopies) lane(name string) (copyLane, error) {
	s, err := c.dev.NewStream(name, true)
	if err != nil {
		return nil, err
	}
	return &cudaLane{s, c}, nil
}

func (c *cudaCopies) probe() (copyPlace, error) {
	m, err := c.dev.Alloc(512)
	if err != nil {
		return copyPlace{}, err
	}
	return c.export(uint64(uintptr(m.Ptr())))
}

func (c *cudaCopies) local(v View) (uint64, error) {
	if at := v.Memory().Device(); at != c.dev.Place() {
		return 0, fmt.Errorf("it lies on %v, this rank's device is %v", at, c.dev.Place())
	}
	return cuda.Addr(v), nil
}

func (c *cudaCopies) export(addr uint64) (copyPlace, error) {
	base, _, ok := c.dev.Allocation(addr)
	if !ok {
		return copyPlace{}, fmt.Errorf("memory that %v did not allocate cannot be received into", c.dev)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h, ok := c.exports[base]
	if !ok {
		var err error
		if h, err = c.dev.Export(base); err != nil {
			return copyPlace{}, err
		}
		c.exports[base] = h
	}
	return copyPlace{addr: addr, offset: addr - base, handle: h}, nil
}

// reach maps an allocation once, and keeps it.
func (c *cudaCopies) reach(p *copyPlace, sameProcess bool) (uint64, error) {
	if sameProcess {
		base := p.addr - p.offset
		if !c.near[base] {
			if err := c.dev.Reach(base); err != nil {
				return 0, err
			}
			c.near[base] = true
		}
		return p.addr, nil
	}
	h := cuda.IPCHandle(p.handle)
	base, ok := c.imports[h]
	if !ok {
		var err error
		if base, err = c.dev.Import(h); err != nil {
			return 0, err
		}
		c.imports[h] = base
	}
	return base + p.offset, nil
}

func (c *cudaCopies) hold(compute tensor.Stream, l copyLane) { compute.Wait(l.record()) }

// cudaLane is a stream of copies.
type cudaLane struct {
	s *cuda.Stream
	c *cudaCopies
}

func (l *cudaLane) after(e tensor.Event)      { l.s.Wait(e) }
func (l *cudaLane) record() tensor.Event      { return l.s.Record() }
func (l *cudaLane) wait(f *uint64, n uint64)  { l.s.WaitValue(l.c.flag(f), n) }
func (l *cudaLane) write(f *uint64, n uint64) { l.s.WriteValue(l.c.flag(f), n) }

func (l *cudaLane) copy(dst, src uint64, n int64) {
	l.s.Do("copy to peer", func() error { l.s.Copy(dst, src, n); return nil })
}

func (l *cudaLane) fail(err error)       { l.s.Fail(err) }
func (l *cudaLane) onFail(f func(error)) { l.s.OnFail(f) }
func (l *cudaLane) idle() bool           { return l.s.Idle() }
func (l *cudaLane) close() error         { return l.s.Close() }
