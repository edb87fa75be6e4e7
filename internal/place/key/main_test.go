package key

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/place"
)

// as makes the test binary a program for scripts/test-slurm.
var as = flag.String("as", "", "share: get the key of the job that this is a task of, and print a hash of it; \"\": run the tests")

func TestMain(m *testing.M) {
	flag.Parse()
	if *as == "share" {
		if err := share(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		return
	}
	os.Exit(m.Run())
}

// share prints a hash of the key. The first task stays for five seconds, to serve the others.
func share() error {
	p, err := place.Find(os.Getenv, place.Flags{NodeRank: -1})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	k, s, err := Source{File: os.Getenv("CPRUN_KEY_FILE"), Stdin: os.Stdin, Refused: func(err error) { fmt.Println("refused:", err) }}.Share(ctx, p)
	if err != nil {
		return err
	}
	fmt.Printf("rank %d key %x\n", p.Rank, sha256.Sum256(k[:]))
	if p.Rank == 0 {
		time.Sleep(5 * time.Second)
	}
	return s.Close()
}
