/* Resolves a name with the libc that it is linked with. musl sends each question from one unconnected socket to all
 * nameservers at once, and takes an answer only where its source is one of them. */

#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int argc, char **argv) {
    struct addrinfo *list, hints = {.ai_socktype = SOCK_STREAM};
    if (argc != 2) {
        fprintf(stderr, "usage: resolve NAME\n");
        return 2;
    }
    int error = getaddrinfo(argv[1], NULL, &hints, &list);
    if (error) {
        fprintf(stderr, "%s: %s\n", argv[1], gai_strerror(error));
        return 1;
    }
    for (struct addrinfo *entry = list; entry; entry = entry->ai_next) {
        char address[NI_MAXHOST];
        if (getnameinfo(entry->ai_addr, entry->ai_addrlen, address, sizeof address, NULL, 0, NI_NUMERICHOST) == 0)
            puts(address);
    }
    freeaddrinfo(list);
    return 0;
}
