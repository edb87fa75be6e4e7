package files

import (
	"slices"
	"strings"

	"github.com/bmatcuk/doublestar/v4"
)

// Glob returns the sorted paths that a pattern matches: the syntax of path.Match, {a,b}, and ** for any number of
// directories. As in a shell, wildcards do not match names that begin with a dot. ** does not follow symbolic links,
// which may form a loop. A directory that cannot be read is an error.
func Glob(pattern string) ([]string, error) {
	opts := []doublestar.GlobOption{doublestar.WithNoHidden(), doublestar.WithFailOnIOErrors()}
	if strings.Contains(pattern, "**") {
		opts = append(opts, doublestar.WithNoFollow())
	}
	paths, err := doublestar.FilepathGlob(pattern, opts...)
	slices.Sort(paths)
	return paths, err
}
