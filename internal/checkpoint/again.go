package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/files"
)

// tries is how often a call is made that meets what the next may not: see passing.
const tries = 4

// passing reports whether a call may succeed when it is made anew: another host has replaced or removed what
// a name was looked up to be, or a signal came, or somebody has a file open that is to be replaced.
func passing(err error) bool {
	return errors.Is(err, syscall.ESTALE) || errors.Is(err, syscall.EINTR) || errors.Is(err, syscall.EBUSY)
}

// again calls f, and again while its error is a passing one. f begins anew each time, with the opening
// of what it uses.
func again(d store, f func() error) error {
	for i := 1; ; i++ {
		err := f()
		if i == tries || !passing(err) {
			return err
		}
		if errors.Is(err, syscall.EBUSY) {
			d.Pause(context.Background(), firstPause<<i)
		}
		_ = d.Refresh() // its own error comes back from f
	}
}

// reopened returns again in a directory that others use at the same time.
func reopened(f func() error) (err error) {
	for range tries {
		if err = f(); !passing(err) {
			break
		}
	}
	return err
}

// await calls f until it finds what another host has made, for as long as names that were not there may
// be remembered. Where no other host writes it calls f once.
func await(ctx context.Context, d store, limit time.Duration, f func() error) error {
	err := again(d, f)
	if !d.Remote() {
		return err
	}
	for wait, waited := firstPause, time.Duration(0); late(err) && waited < limit && ctx.Err() == nil; wait = min(2*wait, lastPause) {
		d.Pause(ctx, wait)
		waited += wait
		_ = d.Refresh()
		err = again(d, f)
	}
	return err
}

// Pauses between two looks at what another host has made, and for how long it is looked for: in short
// where it may never have been there, and for longer than a client keeps names by default (a minute)
// where it was told that it is.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
	shortWait  = 3 * time.Second
	longWait   = 2 * time.Minute
)

// errBehind is the cause where a file is not yet as another host has left it.
var errBehind = errors.New("not as it was written")

// A behind is an error in its own words that may be of an old view.
type behind struct{ error }

// Unwrap returns errBehind alone: what is missing in an old view is not known to be missing.
func (b *behind) Unwrap() error { return errBehind }

// late reports whether an error may be of a view of the directory that is older than what was told.
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

// advice is what to do about the errors of a file system that end a save.
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

// advised adds to an error of a file system what to do about it.
func advised(err error) error {
	for _, a := range advice {
		if errors.Is(err, a.cause) {
			return fmt.Errorf("%w; %s", err, a.fix)
		}
	}
	return err
}
