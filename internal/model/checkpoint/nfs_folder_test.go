package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"syscall"
	"time"
)

// A folder is a directory that a host has open.
type folder struct {
	h    *host
	n    *node
	path string
}

func (h *host) folder() *folder { return &folder{h, h.s.root, "/run/checkpoints"} }

// locked begins a call: it locks the server and may return a fault. done ends the call.
func (d *folder) locked(may ...error) (done func(), err error) {
	d.h.s.mu.Lock()
	err = d.h.call(may...)
	if err == nil && d.n.gone {
		err = syscall.ESTALE
	}
	return d.h.s.mu.Unlock, err
}

func (d *folder) fail(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: d.path + "/" + name, Err: err}
}

func (d *folder) Name() string { return d.path }
func (d *folder) Close() error { return nil }
func (d *folder) Remote() bool { return true }

func (d *folder) Pause(_ context.Context, t time.Duration) {
	d.h.s.mu.Lock()
	defer d.h.s.mu.Unlock()
	if time.Duration(d.h.r.Int64N(int64(lastPause))) < t {
		clear(d.h.seen)
	}
}

func (d *folder) Refresh() error {
	done, err := d.locked(syscall.ESTALE)
	defer done()
	if err == nil {
		d.h.names(d.n, true)
	}
	return d.fail("open", ".", err)
}

func (d *folder) List() (all []fs.DirEntry, err error) {
	done, err := d.locked(syscall.ESTALE)
	defer done()
	if err != nil {
		return nil, d.fail("readdir", ".", err)
	}
	kids := d.h.names(d.n, false)
	for _, name := range slices.Sorted(maps.Keys(kids)) {
		all = append(all, fs.FileInfoToDirEntry(info{name, kids[name]}))
	}
	return all, nil
}

func (d *folder) Lstat(name string) (fs.FileInfo, error) {
	done, err := d.locked(syscall.ESTALE)
	defer done()
	var n *node
	if err == nil {
		n, err = d.h.find(d.n, name)
	}
	if err != nil {
		return nil, d.fail("lstat", name, err)
	}
	return info{name, n}, nil
}

func (d *folder) Open(name string) (file, error) {
	done, err := d.locked(syscall.ESTALE, syscall.EINTR)
	defer done()
	var n *node
	if err == nil {
		d.h.names(d.n, d.h.r.IntN(2) == 0)
		n, err = d.h.find(d.n, name)
	}
	if err == nil && n.kids != nil {
		err = syscall.EISDIR
	}
	if err != nil {
		return nil, d.fail("open", name, err)
	}
	n.open(d.h, 1)
	return &reading{d: d, name: name, n: n}, nil
}

func (d *folder) Update(name string) (file, error) {
	dir, base, sub := bytes.Cut([]byte(name), []byte("/"))
	if !sub {
		return d.Open(name)
	}
	in, err := d.Dir(string(dir))
	if err != nil {
		return nil, err
	}
	return in.Open(string(base))
}

func (d *folder) Dir(name string) (store, error) {
	done, err := d.locked(syscall.ESTALE)
	defer done()
	var n *node
	if err == nil {
		n, err = d.h.find(d.n, name)
	}
	if err == nil && n.kids == nil {
		err = syscall.ENOTDIR
	}
	if err != nil {
		return nil, d.fail("open", name, err)
	}
	return &folder{d.h, n, d.path + "/" + name}, nil
}

func (d *folder) Sub(name string) (store, error) {
	done, err := d.locked(syscall.ESTALE, syscall.ENOSPC, syscall.EIO)
	defer done()
	if err != nil {
		return nil, d.fail("mkdir", name, err)
	}
	n := d.n.kids[name]
	if n == nil {
		n = &node{kids: map[string]*node{}}
		d.n.change()
		d.n.kids[name] = n
	}
	d.h.names(d.n, true)
	if n.kids == nil {
		return nil, d.fail("mkdir", name, syscall.ENOTDIR)
	}
	return &folder{d.h, n, d.path + "/" + name}, nil
}

// add creates a file with an unused name.
func (d *folder) add(name string) (*node, error) {
	if d.n.kids[name] != nil {
		return nil, syscall.EEXIST
	}
	n := &node{}
	d.n.change()
	d.n.kids[name] = n
	d.h.names(d.n, true)
	return n, nil
}

func (d *folder) Create(temp, name string) (draft, error) {
	done, err := d.locked(syscall.ESTALE, syscall.ENOSPC, syscall.EIO, syscall.EINTR)
	defer done()
	var n *node
	if err == nil {
		n, err = d.add(temp)
	}
	if err != nil {
		return nil, d.fail("create", temp, err)
	}
	n.open(d.h, 1)
	return &writing{d: d, n: n, temp: temp, name: name}, nil
}

func (d *folder) Exclusive(name string, data []byte) error {
	done, err := d.locked(syscall.ESTALE, syscall.ENOSPC)
	defer done()
	var n *node
	if err == nil {
		n, err = d.add(name)
	}
	if err != nil {
		return d.fail("create", name, err)
	}
	n.data, n.durable, n.synced = data, data, true
	return d.fail("create", name, d.h.after(syscall.ESTALE))
}

func (d *folder) Rename(from, to string) error {
	done, err := d.locked(syscall.ESTALE, syscall.EIO, syscall.EBUSY)
	defer done()
	if err == nil {
		err = d.rename(from, to)
	}
	if err == nil {
		err = d.h.after(syscall.EIO)
	}
	return d.fail("rename", from, err)
}

// rename refuses to replace an open file or a directory with entries.
func (d *folder) rename(from, to string) error {
	n, over := d.n.kids[from], d.n.kids[to]
	switch {
	case n == nil:
		return syscall.ENOENT
	case over != nil && over.kids != nil && len(over.kids) > 0:
		return syscall.ENOTEMPTY
	case over != nil && over.held():
		return syscall.EBUSY
	}
	d.n.change()
	if over != nil {
		over.gone = true
	}
	delete(d.n.kids, from)
	d.n.kids[to] = n
	d.h.names(d.n, true)
	return nil
}

func (d *folder) RemoveAll(name string) error {
	done, err := d.locked(syscall.ESTALE, syscall.EIO)
	defer done()
	if n := d.n.kids[name]; err == nil && n != nil {
		err = d.h.empty(n)
		if err == nil {
			d.n.change()
			n.gone = true
			delete(d.n.kids, name)
		}
		d.h.names(d.n, true)
	}
	return d.fail("remove", name, err)
}

// empty removes the entries of a directory. An NFS client keeps open files under another name (.nfs...).
func (h *host) empty(n *node) error {
	for _, name := range slices.Sorted(maps.Keys(n.kids)) {
		k := n.kids[name]
		if k.kids != nil {
			if err := h.empty(k); err != nil {
				return err
			}
		}
		n.change()
		delete(n.kids, name)
		if k.opens[h] > 0 { // a handle of another host becomes stale
			n.kids[".nfs"+fmt.Sprint(len(n.history))] = k
		} else {
			k.gone = true
		}
		if err := h.after(errDead, syscall.EIO); err != nil { // the host may die in the middle
			h.dead = h.dead || errors.Is(err, errDead) && h.dies > 0
			return err
		}
	}
	if len(n.kids) > 0 {
		return syscall.ENOTEMPTY
	}
	return nil
}

func (d *folder) Sync() error {
	done, err := d.locked(syscall.ESTALE, syscall.EIO)
	defer done()
	if err == nil {
		d.n.history = nil
	}
	return d.fail("sync", ".", err)
}
