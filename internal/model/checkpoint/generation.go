package checkpoint

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// ErrSuperseded reports that a newer start of the run exists. This start commits nothing more.
var ErrSuperseded = errors.New("a newer start of this run has begun")

// Each start creates a file such as .generation-00000003, by rank 0 or, on several nodes, by the leading launcher.
var generationPattern = regexp.MustCompile(`^\.generation-(\d{8,18})$`)

func generationName(n int64) string { return fmt.Sprintf(".generation-%08d", n) }

// An origin describes the holder of a generation or lock, for finding the process. It recognizes its own file by Token.
type origin struct {
	Job   string    `json:"job,omitempty"`
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Time  time.Time `json:"time"`
	Token string    `json:"token"`
	// Decision of the launchers of several nodes: the world of the start, with the secret of its workers.
	Decision json.RawMessage `json:"decision,omitempty"`
}

const (
	maxOrigin = 4 << 10  // without a decision
	maxRecord = 16 << 20 // a decision fits one message between launchers
)

func newOrigin() origin {
	host, _ := os.Hostname() // for people only
	return origin{Host: host, PID: os.Getpid(), Time: time.Now().UTC().Truncate(time.Second),
		Token: rand.Text()}
}

// String describes the process for a person.
func (o origin) String() string {
	if o.Host == "" {
		return "a process that it does not name"
	}
	job := ""
	if o.Job != "" {
		job = "job " + terminal.Name(fmt.Sprintf("%.64s", o.Job)) + ", "
	}
	return fmt.Sprintf("%sprocess %d on host %s, since %s", job, o.PID, terminal.Name(fmt.Sprintf("%.255s", o.Host)),
		o.Time.Format(time.RFC3339))
}

// generations lists the generations of a directory, past any cache.
func generations(d store) (all []int64, err error) {
	entries, err := entriesOf(d)
	if err != nil {
		return nil, fmt.Errorf("starts of this run: %w", err)
	}
	for _, e := range entries {
		if m := generationPattern.FindStringSubmatch(e.Name()); m != nil {
			n, _ := strconv.ParseInt(m[1], 10, 64) // 18 digits are in range
			all = append(all, n)
		}
	}
	return all, nil
}

func last(all []int64) int64 { return slices.Max(append(all, 0)) }

// NextGeneration returns the number of the next start in a checkpoints directory locked by this process. Each restart
// of the job adds one.
func NextGeneration(dir *os.Root) (int64, error) {
	d, err := reopen(dir)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	all, err := generations(d)
	return last(all) + 1, err
}

// Claim records the decision of a job's launchers as start.Generation, and returns it. If another launcher has recorded
// that number or a later one, it returns the newest decision instead. So two launchers that cannot reach each other do
// not decide the same start. A nil decision records nothing; the result is nil if there is none yet. The error is
// ErrSuperseded if a newer job has begun.
//
// The file server decides which of two new files exists, so the result does not depend on the caches of the hosts.
func Claim(ctx context.Context, dir *os.Root, start Start, decision []byte) (newest []byte, err error) {
	d, err := reopen(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	f := newFence(d, start)
	newest, err = f.decide(ctx, decision)
	return newest, withFix(err)
}

// A fence keeps the processes of older starts from writing checkpoints.
type fence struct {
	dir   store
	own   origin
	start Start
}

func newFence(dir store, start Start) fence {
	f := fence{dir: dir, own: newOrigin(), start: start}
	f.own.Job = start.Job
	return f
}

func (f *fence) decide(ctx context.Context, decision []byte) ([]byte, error) {
	if decision != nil {
		err := f.claim(decision)
		if err == nil {
			return decision, nil
		}
		if !errors.Is(err, ErrSuperseded) && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	for {
		all, err := generations(f.dir)
		n := last(all)
		if n < f.start.First { // or err
			return nil, err
		}
		o, err := f.await(ctx, n)
		if err == nil && o.Job != f.own.Job {
			err = f.superseded(n)
		}
		again, seen := generations(f.dir)
		if seen != nil || last(again) == n { // else n may have been removed, and recorded again by a late launcher
			return o.Decision, cmp.Or(seen, err)
		}
	}
}

// claim records this start, which must be the newest. Generation 0 takes the next number.
func (f *fence) claim(decision []byte) error {
	all, err := generations(f.dir)
	if err != nil {
		return err
	}
	n := last(all)
	f.own.Decision, f.start.Generation = decision, cmp.Or(f.start.Generation, n+1)
	newer, err := f.ofNewerJob(n)
	switch {
	case err != nil:
		return err
	case newer || n > f.start.Generation:
		return f.superseded(n)
	}
	if err := f.create(); err != nil {
		return fmt.Errorf("record of this start: %w", err)
	}
	return f.check() // if two starts race, each checks after its record
}

// ofNewerJob reports whether generation n is of a job that began after this one.
func (f *fence) ofNewerJob(n int64) (bool, error) {
	if f.start.First == 0 || n < f.start.First {
		return false, nil
	}
	o, err := f.await(context.Background(), n)
	return o.Job != f.own.Job, err
}

// create creates the file of the generation. It fails if the file exists.
func (f *fence) create() error {
	name := generationName(f.start.Generation)
	err := retry(f.dir, func() error { return f.dir.Exclusive(name, append(encode(f.own), '\n')) })
	if errors.Is(err, fs.ErrExist) {
		made := f.originOf(f.start.Generation)
		if made.Token != f.own.Token { // else the client sent the request twice
			return fmt.Errorf("generation %d has been taken by %s: %w; start the run again", f.start.Generation, made,
				fs.ErrExist)
		}
		err = nil
	}
	if err != nil {
		return err
	}
	return f.dir.Sync()
}

// check returns an error unless this start is the newest. It reopens the directory, so that it sees every earlier
// record, whatever the host caches.
func (f *fence) check() error {
	all, err := generations(f.dir)
	if err != nil {
		return err
	}
	switch n := last(all); {
	case n > f.start.Generation:
		return f.superseded(n)
	case n < f.start.Generation:
		return fmt.Errorf("%s, which records this start: %v: %w, or somebody has removed it; start the run again",
			terminal.Name(pathOf(f.dir, generationName(f.start.Generation))), syscall.ENOENT, ErrSuperseded)
	}
	return nil
}

func (f *fence) superseded(by int64) error {
	return fmt.Errorf("%w: number %d, by %s; this one is number %d, and commits nothing more", ErrSuperseded, by,
		f.originOf(by), f.start.Generation)
}

// originOf returns the origin of a generation, if readable.
func (f *fence) originOf(n int64) origin {
	o, _ := f.read(n)
	return o
}

// await reads a record once this host sees it.
func (f *fence) await(ctx context.Context, n int64) (o origin, err error) {
	err = awaitVisible(ctx, f.dir, longWait, func() (err error) {
		o, err = f.read(n)
		return err
	})
	return o, err
}

func (f *fence) read(n int64) (o origin, err error) {
	data, err := readIn(f.dir, generationName(n), maxRecord)
	if err != nil {
		return o, err
	}
	if err := json.Unmarshal(data, &o); err != nil {
		return o, fmt.Errorf("%s: it does not say who made it: %w: %w",
			terminal.Name(pathOf(f.dir, generationName(n))), err, errStale)
	}
	return o, nil
}

func (f *fence) removeOlder() error {
	all, err := generations(f.dir)
	for _, n := range all {
		if n < f.start.Generation {
			err = cmp.Or(err, f.dir.RemoveAll(generationName(n)))
		}
	}
	if err != nil {
		err = fmt.Errorf("records of earlier starts: %w", err)
	}
	return err
}

const tries = 4

// transient reports whether a call may succeed if repeated: another host has replaced or removed a file, a signal
// interrupted the call, or the target is open.
func transient(err error) bool {
	return errors.Is(err, syscall.ESTALE) || errors.Is(err, syscall.EINTR) || errors.Is(err, syscall.EBUSY)
}

// retry calls f again while its error is transient. f must open its files anew each time.
func retry(d store, f func() error) error {
	for i := 1; ; i++ {
		err := f()
		if i == tries || !transient(err) {
			return err
		}
		if d == nil { // a directory in use by other goroutines
			continue
		}
		if errors.Is(err, syscall.EBUSY) {
			d.Pause(context.Background(), firstPause<<i)
		}
		_ = d.Refresh() // f returns its error
	}
}

// awaitVisible calls f until it sees the files of another host, for as long as a client may cache absent names. On a
// local file system it calls f once.
func awaitVisible(ctx context.Context, d store, limit time.Duration, f func() error) error {
	err := retry(d, f)
	if !d.Remote() {
		return err
	}
	wait, waited := firstPause, time.Duration(0)
	for maybeStale(err) && waited < limit && ctx.Err() == nil {
		d.Pause(ctx, wait)
		_ = d.Refresh() // f returns its error
		err = retry(d, f)
		wait, waited = min(2*wait, lastPause), waited+wait
	}
	return err
}

// These are the pauses between two attempts to see files of another host, and the limits: a short one for files that
// may not exist, and one above the minute for which clients cache names, for files that must exist.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
	shortWait  = 3 * time.Second
	longWait   = 2 * time.Minute
)

// errStale reports a file without the last writes of another host.
var errStale = errors.New("not as it was written")

// A staleView is an error that an outdated view of the directory may cause.
type staleView struct{ error }

// Unwrap returns errStale alone: an outdated view does not prove that a file is missing.
func (b *staleView) Unwrap() error { return errStale }

// maybeStale reports whether an outdated view of the directory may explain an error.
func maybeStale(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, errStale) || errors.Is(err, syscall.ESTALE)
}

// readIn returns a whole file. If another host replaces it meanwhile, readIn starts again.
func readIn(d store, name string, limit int64) (data []byte, err error) {
	err = retry(d, func() error {
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

// fixes lists advice for file system errors that end a save.
var fixes = []struct {
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

// withFix adds the advice for a file system error.
func withFix(err error) error {
	for _, a := range fixes {
		if errors.Is(err, a.cause) {
			return fmt.Errorf("%w; %s", err, a.fix)
		}
	}
	return err
}
