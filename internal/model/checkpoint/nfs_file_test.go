package checkpoint

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"slices"
	"syscall"
	"time"
)

// info describes a file.
type info struct {
	name string
	n    *node
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return int64(len(i.n.data)) }
func (i info) ModTime() time.Time { return time.Time{} }
func (i info) IsDir() bool        { return i.n.kids != nil }
func (i info) Sys() any           { return nil }
func (i info) Mode() fs.FileMode {
	if i.n.kids != nil {
		return fs.ModeDir | 0o755
	}
	return 0o644
}

// A reading is a file that a host has open for reading.
type reading struct {
	d    *folder
	name string
	n    *node
	at   int64
}

func (f *reading) Name() string { return f.d.path + "/" + f.name }

func (f *reading) Stat() (fs.FileInfo, error) {
	f.d.h.s.mu.Lock()
	defer f.d.h.s.mu.Unlock()
	return info{f.name, f.n}, nil
}

func (f *reading) Close() error {
	f.d.h.s.mu.Lock()
	defer f.d.h.s.mu.Unlock()
	f.n.open(f.d.h, -1)
	return nil
}

func (f *reading) Read(p []byte) (int, error) {
	n, err := f.ReadAt(p, f.at)
	f.at += int64(n)
	if n > 0 && err == io.EOF {
		err = nil
	}
	return n, err
}

func (f *reading) ReadAt(p []byte, off int64) (int, error) {
	f.d.h.s.mu.Lock()
	defer f.d.h.s.mu.Unlock()
	err := f.d.h.call(syscall.ESTALE)
	if err == nil && f.n.gone {
		err = syscall.ESTALE
	}
	if err != nil {
		return 0, f.d.fail("read", f.name, err)
	}
	return bytes.NewReader(f.n.data).ReadAt(p, off)
}

// A writing is a file that a host has open for writing. The host reports a failed write at once, at a sync or at the
// close.
type writing struct {
	d          *folder
	n          *node
	temp, name string
	owed       error
	closed     bool
}

func (f *writing) Write(p []byte) (int, error) {
	done, err := f.d.locked(syscall.ENOSPC, syscall.EIO, syscall.ESTALE)
	defer done()
	if err != nil {
		return 0, f.d.fail("write", f.name, err)
	}
	if err := f.d.h.after(syscall.EIO, syscall.ENOSPC, syscall.EDQUOT); err != nil {
		f.owed = err // the bytes are lost
		return len(p), nil
	}
	f.n.data, f.n.synced = append(slices.Clip(f.n.data), p...), false
	return len(p), nil
}

func (f *writing) Sync() error {
	done, err := f.d.locked(syscall.EIO, syscall.ENOSPC, syscall.ESTALE)
	defer done()
	return f.d.fail("fsync", f.name, f.sync(err))
}

func (f *writing) sync(err error) error {
	if err == nil && f.owed != nil {
		return f.owed
	}
	if err == nil {
		f.n.durable, f.n.synced = f.n.data, true
	}
	return err
}

func (f *writing) Commit() error {
	done, err := f.d.locked(syscall.EIO, syscall.ENOSPC, syscall.ESTALE)
	if err = f.sync(err); err == nil {
		f.close()
		err = f.d.rename(f.temp, f.name)
	}
	done()
	if err != nil {
		return errors.Join(f.d.fail("close", f.name, err), f.Discard())
	}
	return nil
}

func (f *writing) close() {
	if !f.closed {
		f.n.open(f.d.h, -1)
	}
	f.closed = true
}

func (f *writing) Discard() error {
	done, err := f.d.locked()
	defer done()
	f.close()
	if err == nil && f.d.n.kids[f.temp] == f.n {
		f.d.n.change()
		delete(f.d.n.kids, f.temp)
		f.n.gone = true
	}
	return f.d.fail("remove", f.temp, err)
}
