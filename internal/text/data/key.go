package data

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/cprun/cprun/internal/base/files"
)

// cacheVersion is part of every key. TestCacheVersionFollowsTheRules fails if a change of the rules needs another one.
const cacheVersion = "2"

// cacheKey names the entry of files by their content and by all that decides their tokens. It begins with a digest of
// the sizes, which is quickly computed: key is "" if the cache may not be filled and has no entry of these sizes.
func (d *Dataset) cacheKey(paths []string) (key string, err error) {
	s := &d.source
	sizes, stats := sha256.New(), sha256.New()
	fmt.Fprintf(sizes, "%s %q %d %d\n", cacheVersion, s.Format, s.EOS, s.Vocab)
	if err := s.addEncoder(sizes); err != nil {
		return "", err
	}
	settled := true // no file may change again at the same time of change
	for _, path := range paths {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return "", &fs.PathError{Op: "stat", Path: path, Err: err}
		}
		name, _ := unpacked(path) // the extensions select the kind
		fmt.Fprintf(sizes, "%q %q %d\n", filepath.Ext(name), filepath.Ext(path), st.Size)
		settled = settled && time.Since(time.Unix(st.Ctim.Unix())) > clockStep
		fmt.Fprintf(stats, "%q %d %d %d %d %d\n", path, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), st.Ino, st.Dev)
	}
	first := hexOf(sizes, 8)
	if s.Cache.Known {
		if entries, err := filepath.Glob(filepath.Join(s.Cache.Dir, first+"*")); len(entries) == 0 {
			return "", err
		}
	}
	memo := filepath.Join(s.Cache.Dir, "sum-"+hexOf(stats, 16))
	sum, err := files.Read(memo, 1<<10)
	if err != nil || len(sum) != 2*sumBytes {
		all, err := hashFiles(paths)
		if err != nil {
			return "", err
		}
		if sum = []byte(hexOf(all, sumBytes)); settled {
			remember(memo, sum) // else the next process computes it again
		}
	}
	return first + string(sum), nil
}

const (
	sumBytes  = 16
	hashPiece = 16 << 20
)

// clockStep exceeds the granularity of times of change, also of file servers.
var clockStep = 3 * time.Second

// remember keeps the digest of files under their inodes and times of change, which no program can set.
func remember(path string, sum []byte) {
	if root, err := files.Make(filepath.Dir(path)); err == nil {
		_ = files.WriteData(root, filepath.Base(path), sum)
		root.Close()
	}
}

// addEncoder adds what turns records into tokens: the tokenizer's files, the chat template, and the choice of targets.
func (s *Source) addEncoder(h hash.Hash) error {
	var paths []string
	if t := s.Tokenizer; t.bytes() {
		fmt.Fprintln(h, Bytes)
	} else {
		paths = append(paths, t.files()...)
	}
	if c := s.Chat; c != nil {
		fmt.Fprintf(h, "all %t\n", c.All)
		paths = append(paths, c.files...)
	}
	for i, path := range paths { // by their place, since files may move
		f, size, err := openSized(path)
		if path == "" || errors.Is(err, fs.ErrNotExist) { // if it is needed, encoding fails
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		fmt.Fprintln(h, i, size)
		_, err = io.Copy(h, f)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", path, cause(err))
		}
	}
	return nil
}

func hexOf(h hash.Hash, bytes int) string { return hex.EncodeToString(h.Sum(nil)[:bytes]) }

// hashFiles hashes the bytes of files on all cores, in pieces.
func hashFiles(paths []string) (hash.Hash, error) {
	sums := make([][][]byte, len(paths))
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i, path := range paths {
		st, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		sums[i] = make([][]byte, (st.Size()+hashPiece-1)/hashPiece)
		for k := range sums[i] {
			at := int64(k) * hashPiece
			g.Go(func() (err error) {
				sums[i][k], err = hashRange(path, at, min(hashPiece, st.Size()-at))
				return err
			})
		}
	}
	err := g.Wait()
	all := sha256.New()
	for _, list := range sums {
		fmt.Fprintln(all, len(list))
		for _, sum := range list {
			all.Write(sum)
		}
	}
	return all, err
}

// hashRange returns the SHA-256 of bytes of a file.
func hashRange(path string, at, n int64) ([]byte, error) {
	f, err := files.Open(path)
	if err != nil {
		return nil, fmt.Errorf("data file %s: %w", path, cause(err))
	}
	defer f.Close()
	h := sha256.New()
	got, err := io.CopyBuffer(h, io.NewSectionReader(f, at, n), make([]byte, 256<<10))
	if err == nil && got != n {
		err = errors.New("the file has become shorter since it was opened")
	}
	if err != nil {
		return nil, fmt.Errorf("data file %s: %w", path, cause(err))
	}
	return h.Sum(nil), nil
}
