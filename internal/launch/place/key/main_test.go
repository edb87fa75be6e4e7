package key

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/base/files"
)

// as runs the test binary as a process of a job; its argument is the path of the key.
var as = flag.String(
	"as",
	"",
	"share: print a hash of the key; draft: write a draft, and wait to be killed; \"\": run the tests",
)

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	switch *as {
	case "share":
		var k Key
		if k, err = Shared(ended(), flag.Arg(0)); err == nil {
			fmt.Printf("%x\n", sha256.Sum256(k[:]))
		}
	case "draft":
		var root *os.Root
		if root, err = files.OpenDir(filepath.Dir(flag.Arg(0))); err == nil {
			if _, err = draft(root, filepath.Base(flag.Arg(0))); err == nil {
				fmt.Println("written")
				select {}
			}
		}
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}
