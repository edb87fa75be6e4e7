package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
)

// tries bounds the calls of an operation with passing errors.
const tries = 4

// passing reports whether a call may succeed when it is made anew: another host has replaced or removed what
// a name was looked up to be, or a signal came, or the file to replace is open somewhere.
func passing(err error) bool {
	return errors.Is(err, syscall.ESTALE) || errors.Is(err, syscall.EINTR) || errors.Is(err, syscall.EBUSY)
}

// again calls f, and again while its error is a passing one. f begins anew each time: it opens
// its files itself.
func again(d store, f func() error) error {
	for i := 1; ; i++ {
		err := f()
		if i == tries || !passing(err) {
			return err
		}
		if d == nil { // a directory that others use at the same time
			continue
		}
		if errors.Is(err, syscall.EBUSY) {
			d.Pause(context.Background(), firstPause<<i)
		}
		_ = d.Refresh() // its own error comes back from f
	}
}

// await calls f until it finds the files of another host, as long as a client may remember that names are
// absent. If no other host writes, it calls f once.
func await(ctx context.Context, d store, limit time.Duration, f func() error) error {
	err := again(d, f)
	if !d.Remote() {
		return err
	}
	wait := firstPause
	for waited := time.Duration(0); late(err) && waited < limit && ctx.Err() == nil; waited += wait {
		d.Pause(ctx, wait)
		_ = d.Refresh()
		err = again(d, f)
		wait = min(2*wait, lastPause)
	}
	return err
}

// Pauses between two looks for files of another host, and the time to look for them: short
// if they may not exist, and above the minute that a client keeps names by default
// if they are known to exist.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
	shortWait  = 3 * time.Second
	longWait   = 2 * time.Minute
)

// errBehind reports a file that does not show the last writes of another host.
var errBehind = errors.New("not as it was written")

// A behind is an error in its own words that may be of an old view.
type behind struct{ error }

// Unwrap returns errBehind alone: an old view does not prove that a file is missing.
func (b *behind) Unwrap() error { return errBehind }

// late reports whether an old view of the directory may explain an error.
func late(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, errBehind) || errors.Is(err, syscall.ESTALE)
}

// readIn returns a whole file. One that another takes the place of while it is read is read again.
func readIn(d store, name string, limit int64) (data []byte, err error) {
	err = again(d, func() error {
		f, err := d.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		data, err = files.All(f, limit)
		return err
	})
	return data, err
}

// advice lists the fixes for errors of a file system that end a save.
var advice = []struct {
	cause error
	fix   string
}{
	{syscall.ENOSPC, "free space there, or lower checkpoint.keep"},
	{syscall.EDQUOT, "free space of your quota, or lower checkpoint.keep"},
	{syscall.EIO, "the disk or the file server failed; the kernel's log (dmesg) of this node says more"},
	{syscall.ESTALE, "the file server does not know the directory any more; mount it again on this node"},
	{syscall.EROFS, "mount it to be written to"},
	{syscall.EACCES, "let this user write there"},
}

// advised adds the fix to an error of a file system.
func advised(err error) error {
	for _, a := range advice {
		if errors.Is(err, a.cause) {
			return fmt.Errorf("%w; %s", err, a.fix)
		}
	}
	return err
}
