//go:build cuda

package copyengine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/cuda"
	"github.com/cprun/cprun/tensor"
)

// New joins the ranks of host, all of this machine, by the copy engines of their devices. using is held to queue work
// on compute, also by the caller of Exchange. New fails on all ranks or on none. It takes 512 bytes of the device.
func New(ctx context.Context, host *comm.Group, dev *cuda.Device, compute *cuda.Stream,
	using sync.Locker) (*Engine, error) {
	return connect(ctx, config{
		host: host, dev: &cudaCopies{dev: dev}, compute: compute, using: using,
		limit: host.Options().Deadline, share: sharedFile{},
	})
}

// A cudaCopies is the device of a GPU.
type cudaCopies struct {
	dev *cuda.Device

	page    unsafe.Pointer // the flags on the host, and
	flags   uint64         // on the device
	mu      sync.Mutex
	exports map[uint64]cuda.IPCHandle // guarded by mu; by the allocation's address
	imports map[cuda.IPCHandle]region // used under the engine's lock, as is near
	near    map[uint64]region         // allocations of this process that can be reached
}

// Pages are pinned whole, so the flags fill whole pages.
var _ [0]struct{} = [pageWords * 8 % 4096]struct{}{}

func (c *cudaCopies) attach(flags []uint64) (err error) {
	c.exports, c.imports, c.near = map[uint64]cuda.IPCHandle{}, map[cuda.IPCHandle]region{}, map[uint64]region{}
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

// detach frees the resources of attach and reach.
func (c *cudaCopies) detach() error {
	var errs []error
	for _, r := range c.imports {
		errs = append(errs, c.dev.CloseImport(r.base))
	}
	if c.page != nil {
		errs = append(errs, c.dev.Unregister(c.page))
	}
	c.imports, c.page = nil, nil
	return errors.Join(errs...)
}

func (c *cudaCopies) address(flag *uint64) uint64 {
	return c.flags + uint64(uintptr(unsafe.Pointer(flag))-uintptr(c.page))
}

func (c *cudaCopies) identity() uint64 { return c.dev.PCI }

func (c *cudaCopies) lane(name string) (lane, error) {
	s, err := c.dev.NewStream(name, true)
	if err != nil {
		return nil, err
	}
	return &cudaLane{s, c}, nil
}

func (c *cudaCopies) probe() (location, error) {
	m, err := c.dev.Alloc(512)
	if err != nil {
		return location{}, err
	}
	return c.export(m.Addr())
}

func (c *cudaCopies) local(v tensor.View) (uint64, error) {
	if at := v.Memory().Device(); at != c.dev.Place() {
		return 0, fmt.Errorf("it lies on %v, this rank's device is %v", at, c.dev.Place())
	}
	return v.Addr(), nil
}

func (c *cudaCopies) export(addr uint64) (location, error) {
	base, _, ok := c.dev.Allocation(addr)
	if !ok {
		return location{}, fmt.Errorf("memory that %v did not allocate cannot be received into", c.dev)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h, ok := c.exports[base]
	if !ok {
		var err error
		if h, err = c.dev.Export(base); err != nil {
			return location{}, err
		}
		c.exports[base] = h
	}
	return location{addr: addr, offset: addr - base, handle: h}, nil
}

// reach maps an allocation once, and keeps it.
func (c *cudaCopies) reach(p *location, sameProcess bool) (region, error) {
	if sameProcess {
		return c.reachNear(p.addr - p.offset)
	}
	h := cuda.IPCHandle(p.handle)
	r, ok := c.imports[h]
	if ok {
		return r, nil
	}
	var err error
	if r.base, err = c.dev.Import(h); err != nil {
		return region{}, err
	}
	r.bytes = c.size(r.base)
	c.imports[h] = r
	return r, nil
}

// reachNear enables access to an allocation of this process.
func (c *cudaCopies) reachNear(base uint64) (region, error) {
	r, ok := c.near[base]
	if ok {
		return r, nil
	}
	if err := c.dev.Reach(base); err != nil {
		return region{}, err
	}
	r = region{base, c.size(base)}
	c.near[base] = r
	return r, nil
}

// size returns the size of the allocation at base, or no bound if the driver does not report one, as for some imported
// memory.
func (c *cudaCopies) size(base uint64) int64 {
	at, n, err := c.dev.Range(base)
	switch {
	case err != nil:
		return math.MaxInt64
	case at != base:
		return 0 // no allocation begins there
	}
	return n
}

func (c *cudaCopies) hold(compute tensor.Stream, l lane) { compute.Wait(l.record()) }

// A cudaLane is a stream of copies.
type cudaLane struct {
	s *cuda.Stream
	c *cudaCopies
}

func (l *cudaLane) after(e tensor.Event)      { l.s.Wait(e) }
func (l *cudaLane) record() tensor.Event      { return l.s.Record() }
func (l *cudaLane) wait(f *uint64, n uint64)  { l.s.WaitValue(l.c.address(f), n) }
func (l *cudaLane) write(f *uint64, n uint64) { l.s.WriteValue(l.c.address(f), n) }

func (l *cudaLane) copy(dst, src uint64, n int64, peer int) {
	detail := ""
	if l.s.Traced() {
		detail = fmt.Sprintf("%d bytes to rank %d", n, peer)
	}
	l.s.DoDetailed("copy to peer", detail, func() error { l.s.Copy(dst, src, n); return nil })
}

func (l *cudaLane) fail(err error)        { l.s.Fail(err) }
func (l *cudaLane) onFail(f func(error))  { l.s.OnFail(f) }
func (l *cudaLane) idle() bool            { return l.s.Idle() }
func (l *cudaLane) close() error          { return l.s.Close() }
func (l *cudaLane) stream() tensor.Stream { return l.s }
