package config

import "strings"

// Completions returns the keys of train.yaml that begin with a prefix, each with "=" after it, as --set takes
// them.
func Completions(prefix string) (found []string) {
	for i := range keys {
		if strings.HasPrefix(keys[i].path, prefix) {
			found = append(found, keys[i].path+"=")
		}
	}
	return found
}
